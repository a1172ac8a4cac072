//! The meaning of the first argument: a command, or a prompt for `generate`.

use std::ffi::OsString;

use clap::{Command, CommandFactory, error::ErrorKind};

use super::Cli;

/// Commands of similar programs, and the commands that do the same here.
const ELSEWHERE: [(&str, &str); 3] = [("run", "chat"), ("ask", "generate"), ("info", "inspect")];

/// Adds the arguments that may be left out: `generate` if a prompt comes first, or if standard input is `piped` and
/// there is no argument, and `bench model` for `bench`. The second value says whether `generate` was added.
///
/// # Errors
/// If the first argument is a single word and not a command: it is more likely mistyped than meant as a prompt.
pub fn complete(mut args: Vec<OsString>, piped: bool) -> Result<(Vec<OsString>, bool), clap::Error> {
    let is_flag =
        |a: &OsString| a.to_str().is_some_and(|a| ["--verbose", "--quiet", "-q"].contains(&a) || a.starts_with("-v"));
    let at = 1 + args.iter().skip(1).take_while(|a| is_flag(a)).count();
    let cli = Cli::command();
    match args.get(at).map(|a| a.to_string_lossy().into_owned()) {
        None if piped => args.push("generate".into()),
        None => return Ok((args, false)),
        Some(first) if ["-h", "--help", "help", "-V", "--version"].contains(&&*first) => return Ok((args, false)),
        Some(first) if first == "bench" => {
            let kinds = cli.find_subcommand("bench").expect("bench is a subcommand");
            let next = args.get(at + 1).and_then(|a| a.to_str()).unwrap_or_default();
            if !["-h", "--help", "help"].contains(&next) && kinds.find_subcommand(next).is_none() {
                args.insert(at + 1, "model".into());
            }
            return Ok((args, false));
        }
        Some(first) if cli.find_subcommand(&first).is_some() => return Ok((args, false)),
        Some(first) if is_word(&first) => return Err(no_command(cli, &first, args.len() > at + 1)),
        Some(_) => args.insert(at, "generate".into()),
    }
    Ok((args, true))
}

/// Whether a prompt looks like the name of a command: one word of ASCII letters, digits, `-` and `_`.
pub fn is_word(prompt: &str) -> bool {
    prompt.starts_with(|c: char| c.is_ascii_alphabetic())
        && prompt.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_'))
}

/// The error that asks back. `more`: other arguments follow.
pub fn no_command(mut cli: Command, word: &str, more: bool) -> clap::Error {
    let lower = word.to_lowercase();
    let names = cli.get_subcommands().filter(|c| !c.is_hide_set()).map(|c| c.get_name());
    let near = names.map(|name| (strsim::damerau_levenshtein(&lower, name), name)).min();
    let meant = match near {
        Some((0, name)) => format!("the command `{name}` comes before its options: `selkie {name} ...`"),
        near => {
            let habit = ELSEWHERE.iter().find(|(other, _)| *other == lower).map(|(_, here)| *here);
            let near = near.filter(|(apart, name)| *apart <= name.len() / 3).map(|(_, name)| name);
            match habit.or(near) {
                Some(name) => format!("no command `{word}`; did you mean `{name}`?"),
                None => format!("no command `{word}`; `selkie --help` lists them."),
            }
        }
    };
    let prompt = match more {
        true => format!("A prompt of several words needs quotes: `selkie \"{word} ...\"`"),
        false => format!("`selkie generate {word}` answers it as a prompt"),
    };
    let text = format!("{meant} {prompt}");
    cli.error(ErrorKind::InvalidSubcommand, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(args: &[&str], piped: bool) -> Result<Vec<String>, String> {
        let args = ["selkie"].iter().chain(args).map(OsString::from).collect();
        let (args, _) = complete(args, piped).map_err(|e| e.to_string())?;
        Ok(args.into_iter().skip(1).map(|a| a.into_string().unwrap()).collect())
    }

    #[test]
    fn a_prompt_comes_to_generate() {
        for prompt in ["Hello there", "Hello!", "17+25", "-", "--seed", "你好", "", "42"] {
            assert_eq!(line(&[prompt], false).unwrap(), ["generate", prompt], "{prompt}");
        }
        assert_eq!(line(&["-v", "Hi!"], false).unwrap(), ["-v", "generate", "Hi!"]);
        assert_eq!(line(&["-q", "chat"], false).unwrap(), ["-q", "chat"]);
        assert_eq!(line(&[], true).unwrap(), ["generate"]);
        assert_eq!(line(&["-q"], true).unwrap(), ["-q", "generate"]);
        assert!(line(&[], false).unwrap().is_empty());
    }

    #[test]
    fn a_word_that_is_no_command_is_a_question_back() {
        for (word, near) in
            [("chatt", "chat"), ("Bacth", "batch"), ("devcies", "devices"), ("run", "chat"), ("inspekt", "inspect")]
        {
            let why = line(&[word], false).unwrap_err();
            let wanted =
                format!("no command `{word}`; did you mean `{near}`? `selkie generate {word}` answers it as a prompt");
            assert!(why.contains(&wanted), "{why}");
        }
        let why = line(&["Hello"], false).unwrap_err();
        assert!(why.contains("no command `Hello`; `selkie --help` lists them."), "{why}");
        let why = line(&["What", "is", "it"], false).unwrap_err();
        assert!(why.contains("A prompt of several words needs quotes"), "{why}");
        let why = line(&["Chat"], false).unwrap_err();
        assert!(why.contains("the command `chat` comes before its options"), "{why}");
        assert!(!line(&["render"], false).unwrap_err().contains("render-chat"));
    }
}
