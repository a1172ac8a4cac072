//! The commands of a chat: `/name rest`.

use std::{fmt::Display, str::FromStr};

use selkie_core::{
    sample::Sampling,
    session::{Ask, Overrides, Prompt, WhenFull},
};

/// The values of a chat's answers.
#[derive(Clone, Debug, Default)]
pub struct Values {
    pub sampling: Sampling,
    pub max_tokens: Option<usize>,
    pub stop: Vec<String>,
    pub when_full: WhenFull,
}

impl Values {
    /// A request with them.
    pub fn ask(&self, prompt: Prompt) -> Ask {
        Ask {
            prompt,
            sampling: Overrides::from(self.sampling),
            max_tokens: self.max_tokens,
            stop: self.stop.clone(),
            when_full: self.when_full,
            ..Ask::default()
        }
    }
}

/// The text of `/help`.
pub const HELP: &str = "/system TEXT      set the system prompt and begin anew (without TEXT: show it)
/retry            answer the last message again, from the state before the answer
/reset, /clear    forget the conversation, keep the system prompt
/set NAME VALUE   change temperature, top-k, top-p, min-p, repetition-penalty, seed, max-tokens or when-full
/set              show these values
/stats            tokens of this conversation and what was reused
/save FILE        write the conversation: as Markdown, as messages for a batch line (FILE.json), or with its state for
                  --load (FILE.bundle)
/help             show this
/exit, /quit, /bye  leave (also Ctrl-D)
Alt-Enter, or \\ at the end of a line, begins a new line; text between lines of \"\"\" is one message.
A message that begins with a slash is written with two. Ctrl-C stops an answer.";

const NAMES: [&str; 11] = ["help", "system", "retry", "reset", "clear", "set", "stats", "save", "exit", "quit", "bye"];
const VALUES: [&str; 8] =
    ["temperature", "top-k", "top-p", "min-p", "repetition-penalty", "seed", "max-tokens", "when-full"];

/// Tab completions of the beginning of a line.
pub fn completions(line: &str) -> Vec<String> {
    let among = |names: &[&str], before: &str, word: &str| {
        let word = word.to_lowercase();
        names.iter().filter(|n| n.starts_with(&word)).map(|n| format!("{before}{n} ")).collect()
    };
    match (line.strip_prefix("/set "), line.strip_prefix('/')) {
        (Some(word), _) => among(&VALUES, "/set ", word),
        (None, Some(word)) => among(&NAMES, "/", word),
        (None, None) => Vec::new(),
    }
}

/// The command that `name` looks like.
pub fn nearest(name: &str) -> Option<&'static str> {
    let near = NAMES.into_iter().map(|known| (strsim::damerau_levenshtein(name, known), known)).min()?;
    (near.0 <= near.1.len().div_ceil(3)).then_some(near.1)
}

/// The values that `/set` changes, one a line.
pub fn values(of: &Values) -> String {
    let s = &of.sampling;
    let limit = of.max_tokens.map_or("default".into(), |n| n.to_string());
    let shown: [&dyn Display; 8] =
        [&s.temperature, &s.top_k, &s.top_p, &s.min_p, &s.repetition_penalty, &s.seed, &limit, &of.when_full.name()];
    let lines: Vec<String> = VALUES.iter().zip(shown).map(|(name, value)| format!("{name:<19} {value}")).collect();
    lines.join("\n")
}

/// Changes one of them and returns its full name.
///
/// # Errors
/// If there is none of that name, or the value is impossible; nothing is changed then.
pub fn set(of: &mut Values, name: &str, value: &str) -> Result<&'static str, String> {
    let name = name.to_lowercase().replace('_', "-");
    let mut new = of.clone();
    let s: &mut Sampling = &mut new.sampling;
    match &*name {
        "temperature" => s.temperature = number(value)?,
        "top-k" => s.top_k = number(value)?,
        "top-p" => s.top_p = number(value)?,
        "min-p" => s.min_p = number(value)?,
        "repetition-penalty" => s.repetition_penalty = number(value)?,
        "seed" => s.seed = number(value)?,
        "max-tokens" => new.max_tokens = Some(number(value)?).filter(|n| *n > 0),
        "when-full" => {
            let policy = WhenFull::from_name(value);
            new.when_full = policy.ok_or_else(|| format!("{value:?} is neither error nor drop-oldest"))?;
        }
        _ => return Err(format!("there is no value {name:?}; there are {}", VALUES.join(", "))),
    }
    new.sampling.check().map_err(|e| e.to_string())?;
    *of = new;
    Ok(VALUES.into_iter().find(|known| *known == name).expect("matched above"))
}

fn number<T: FromStr>(value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("{value:?} is not a possible value"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tab_completes_commands_and_values() {
        assert_eq!(completions("/re"), ["/retry ", "/reset "]);
        assert_eq!(completions("/S"), ["/system ", "/set ", "/stats ", "/save "]);
        assert_eq!(completions("/set t"), ["/set temperature ", "/set top-k ", "/set top-p "]);
        assert!(completions("tell me").is_empty());
    }

    #[test]
    fn values_are_set_by_name() {
        let mut ask = Values::default();
        assert_eq!(set(&mut ask, "Temperature", "0.7"), Ok("temperature"));
        assert_eq!(set(&mut ask, "max_tokens", "5"), Ok("max-tokens"));
        assert_eq!(set(&mut ask, "when-full", "drop-oldest"), Ok("when-full"));
        assert_eq!((ask.sampling.temperature, ask.max_tokens, ask.when_full), (0.7, Some(5), WhenFull::DropOldest));
        for (name, value) in [("temperature", "-1"), ("temperature", "hot"), ("heat", "1"), ("when-full", "drop")] {
            assert!(set(&mut ask, name, value).is_err(), "{name} {value}");
        }
        assert_eq!(ask.sampling.temperature, 0.7);
        assert!(values(&ask).contains("temperature         0.7\n"), "{}", values(&ask));
    }

    #[test]
    fn help_names_every_command() {
        for name in NAMES {
            assert!(HELP.contains(&format!("/{name}")), "{name}");
        }
    }
}
