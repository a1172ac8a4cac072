//! Asking the person at the terminal.

use std::io::{self, BufRead, IsTerminal, Write};

use crate::failure::{Failure, Outcome};

/// Consent to a download or a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consent {
    /// The person at the terminal is asked.
    Ask,
    /// The command itself or --yes gives it.
    Given,
}

/// Whether there is a terminal to ask on.
pub fn can_ask() -> bool {
    io::stdin().is_terminal() && io::stderr().is_terminal()
}

/// Asks, unless consent is given.
///
/// # Errors
/// If the answer is not yes.
pub fn get(consent: Consent) -> Outcome {
    if consent == Consent::Given {
        return Ok(());
    }
    let refused = || Failure::Other("stopped: the answer was not yes".into());
    let mut answer = String::new();
    let _ = write!(io::stderr(), "Go on? [y/N] ");
    io::stdin().lock().read_line(&mut answer).map_err(|_| refused())?;
    let yes = ["y", "yes"].contains(&&*answer.trim().to_lowercase());
    if yes { Ok(()) } else { Err(refused()) }
}
