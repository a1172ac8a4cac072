//! Messages for the hub's refusals: the meaning, and what to do.

use crate::{
    failure::Failure,
    hub::{
        cache::Repo,
        fault::Fault,
        http::Client,
        name::{Name, nearest},
        settings::Settings,
    },
};

/// The failure to report for a fault of a request for `name`.
pub fn explain(fault: Fault, client: &Client, settings: &Settings, name: &Name) -> Failure {
    let (host, repo) = (settings.host(), name.repo());
    let text = match &fault {
        Fault::Local(_) => {
            let Fault::Local(e) = fault else { unreachable!("it was matched") };
            return Failure::Engine(e);
        }
        Fault::Status { code, .. } if code == "GatedRepo" => gated(client, settings, &repo),
        Fault::Status { code, .. } if code == "RevisionNotFound" => format!(
            "{repo} has no revision {:?} on {host}; {}/{repo}/refs lists branches and tags",
            name.revision(),
            settings.endpoint
        ),
        Fault::Status { code, .. } if code == "EntryNotFound" => {
            format!("{fault}: a file of {repo} is gone; try again")
        }
        // The hub answers 401 for missing repositories, so that private names stay private.
        Fault::Status { status: 401 | 404, code, .. } if code == "RepoNotFound" || !client.has_token() => {
            let token = match client.has_token() {
                true => "the token that was sent may not see it".to_owned(),
                false => format!("if it is private or gated, a token is needed: {}", where_tokens_go(settings)),
            };
            format!("{host} has no public model {repo} ({fault}){}; {token}", similar(settings, &repo))
        }
        Fault::Status { status: 401, .. } => {
            format!("{fault}: the token is not valid; {}", where_tokens_go(settings))
        }
        Fault::Status { status: 403, .. } => gated(client, settings, &repo),
        Fault::Status { status: 404, .. } => {
            format!("{host} has no model {repo} ({fault}){}", similar(settings, &repo))
        }
        Fault::Status { status: 429, .. } => {
            format!("{fault}: too many requests; wait some minutes, or send a token: {}", where_tokens_go(settings))
        }
        Fault::Unreachable { .. } => format!(
            "{fault}; {repo} is not complete in the cache ({}), but what came is kept. A proxy is named by HTTPS_PROXY, a mirror by HF_ENDPOINT",
            settings.cache.display()
        ),
        Fault::Cut(_) => format!("{fault}; what came is kept, and the same command goes on from there"),
        Fault::Changed(_) | Fault::Nonsense(_) | Fault::Status { .. } => fault.to_string(),
    };
    Failure::Other(text)
}

fn gated(client: &Client, settings: &Settings, repo: &str) -> String {
    let page = format!("{}/{repo}", settings.endpoint);
    match client.has_token() {
        true => format!(
            "{repo} is gated and the token's account has no access: open {page}, accept its terms, and if the token is fine-grained \
             give it access to gated models"
        ),
        false => format!(
            "{repo} is gated: open {page}, accept its terms, then give a token of that account: {}",
            where_tokens_go(settings)
        ),
    }
}

fn where_tokens_go(settings: &Settings) -> String {
    let file = settings.token_file();
    format!("make one at {}/settings/tokens and set HF_TOKEN, or write it into {}", settings.endpoint, file.display())
}

/// Similar names in the cache.
fn similar(settings: &Settings, repo: &str) -> String {
    let cached = Repo::all(&settings.cache);
    let near = nearest(repo, cached.iter().map(|(name, _)| &**name));
    if near.is_empty() { "; check its spelling".into() } else { format!("; the cache holds {}", near.join(", ")) }
}
