//! `selkie pull`: fetches a model, or its newer files.

use crate::{
    args::PullArgs,
    failure::{Failure, Outcome},
    hub::{consent::Consent, fetch::Fetch, name::Name, settings::Settings},
};

/// Fetches without a question: the command itself is the consent.
pub fn run(args: &PullArgs) -> Outcome {
    let name = parse(&args.name)?;
    let settings = Settings::read()?;
    Fetch::new(&settings, &name)?.all(Consent::Given).map(drop)
}

/// The name that an argument is.
///
/// # Errors
/// If it is none.
pub fn parse(text: &str) -> Outcome<Name> {
    let why = "this is not the name of a model; write owner/name[@revision][:file], for example ibm-granite/granite-4.0-h-350m";
    Name::parse(text).ok_or_else(|| Failure::Usage(format!("{text:?}: {why}")))
}
