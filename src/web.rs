//! `selkie web`: serves the browser page to this machine.

use std::{net::TcpListener, path::Path};

use crate::{
    args::WebArgs,
    failure::{Failure, Outcome},
    terminal::{self, Output},
};

mod files;
mod http;
mod server;

/// Serves until the process is ended.
pub fn run(args: &WebArgs) -> Outcome {
    let site = files::Site::open(&args.dir).map_err(|why| Failure::Other(nothing_there(&args.dir, &why)))?;
    let listener = TcpListener::bind((args.listen, args.port)).map_err(|e| {
        Failure::Other(format!("cannot listen on {} port {}: {e}; --port takes another one", args.listen, args.port))
    })?;
    let address = listener.local_addr().map_err(|e| Failure::Other(format!("the new socket has no address: {e}")))?;
    Output::new().text(&format!("http://{address}/\n"))?;
    if !args.listen.is_loopback() {
        terminal::note(
            "Other machines may open this page, but browsers give them neither WebGPU nor storage over http.",
        );
    }
    terminal::note("Open this address in a browser; Ctrl-C ends.");
    server::serve(&listener, &site)
}

fn nothing_there(dir: &Path, why: &std::io::Error) -> String {
    format!(
        "there is no page in {} ({why}); `web/build` in selkie's sources makes web/dist, --dir names another folder",
        dir.display()
    )
}
