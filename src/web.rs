//! `selkie web`: serves the browser page to this machine. It is the server without a model.

use std::{net::TcpListener, path::Path};

use crate::{
    args::WebArgs,
    failure::{Failure, Outcome},
    serve,
    terminal::{self, Output},
};

use files::Site;

pub mod files;

/// Serves until the process is ended.
pub fn run(args: &WebArgs) -> Outcome {
    let site = site(args.dir.as_deref())?;
    let listener = TcpListener::bind((args.listen, args.port)).map_err(|e| {
        Failure::Other(format!("cannot listen on {} port {}: {e}; --port takes another one", args.listen, args.port))
    })?;
    let address = listener.local_addr().map_err(|e| Failure::Other(format!("the new socket has no address: {e}")))?;
    Output::new().text(&format!("http://{address}/\n"))?;
    if !args.listen.is_loopback() {
        terminal::hint(
            "Other machines may open this page, but browsers give them neither WebGPU nor storage over http.",
        );
    }
    terminal::hint("Open this address in a browser; Ctrl-C ends.");
    serve::page_only(listener, address.port(), site)
}

/// The folder that was named, else the page of the sources that this is started in, else the page in the program.
fn site(dir: Option<&Path>) -> Outcome<Site> {
    const HOW: &str = "`web/build` in selkie's sources makes web/dist, --dir names another folder";
    if let Some(dir) = dir {
        return Site::open(dir)
            .map_err(|why| Failure::Other(format!("there is no page in {} ({why}); {HOW}", dir.display())));
    }
    found().ok_or_else(|| {
        Failure::Other(format!(
            "this build has no page, and there is none in web/dist; release archives have it. {HOW}, and the \
             next `cargo install --path .` includes it"
        ))
    })
}

/// The page that `selkie serve` has at `/`, if there is one.
pub fn found() -> Option<Site> {
    Site::open("web/dist".as_ref()).ok().or_else(Site::program)
}
