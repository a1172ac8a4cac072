//! Options that people repeat: `config.json` in the user's configuration folder, and `SELKIE_MODEL`. They become the
//! defaults of the command line's options, so the command line takes precedence. `selkie config` shows them.

use std::{
    env,
    ffi::{OsStr, OsString},
    io::ErrorKind,
    path::{Path, PathBuf},
};

use clap::{Command, Parser};
use serde_json::{Map, Value, json};

use crate::{
    args::{Cli, ConfigArgs},
    failure::{Failure, Outcome},
    input_file,
    terminal::Output,
};

/// The keys of the file, and the options that they set.
const KEYS: [(&str, &str); 13] = [
    ("model", "model"),
    ("backend", "backend"),
    ("device", "adapter"),
    ("context", "context"),
    ("memory", "memory"),
    ("max_tokens", "max-tokens"),
    ("temperature", "temperature"),
    ("top_k", "top-k"),
    ("top_p", "top-p"),
    ("min_p", "min-p"),
    ("repetition_penalty", "repetition-penalty"),
    ("system", "system"),
    ("when_full", "when-full"),
];
const MODEL_VARIABLE: &str = "SELKIE_MODEL";
/// Maximum bytes of the file.
const MAX_BYTES: u64 = 1 << 20;

/// The values that are set.
#[derive(Debug, Default, PartialEq)]
pub struct Settings {
    /// Path of the file, which may not exist.
    file: Option<PathBuf>,
    set: Vec<Setting>,
}

#[derive(Debug, PartialEq)]
struct Setting {
    key: &'static str,
    /// The text, as on the command line.
    value: String,
    from: String,
}

impl Settings {
    /// Reads file and environment.
    ///
    /// # Errors
    /// If the file cannot be read, has an unknown key or an impossible value. The error names the file and the key.
    pub fn load() -> Result<Self, String> {
        let file = place();
        let bytes = match &file {
            None => None,
            Some(path) => match std::fs::metadata(path) {
                Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => None,
                _ => Some(input_file::load_regular(path, MAX_BYTES).map_err(|e| e.message().unwrap_or_default())?),
            },
        };
        let set = match (&file, bytes) {
            (Some(path), Some(bytes)) => parse(path, &bytes)?,
            _ => Vec::new(),
        };
        let mut all = Self { file, set };
        if let Some(model) = env::var_os(MODEL_VARIABLE).filter(|v| !v.is_empty()) {
            let value = model.into_string().map_err(|_| format!("{MODEL_VARIABLE} is not UTF-8"))?;
            all.set.retain(|s| s.key != "model");
            all.set.push(Setting { key: "model", value, from: MODEL_VARIABLE.into() });
        }
        Ok(all)
    }

    /// `command` with these values as defaults of its subcommands' options. `args` are the arguments that it will
    /// parse: a device belongs to the backend that was set with it, not to another one and not to several GPUs.
    pub fn apply(&self, command: Command, args: &[OsString]) -> Command {
        let named =
            |a: &OsString| a.to_str().is_some_and(|a| matches!(a.split('=').next(), Some("--backend" | "--gpus")));
        let other_backend = args.iter().any(named);
        let set: Vec<(&str, &'static str)> = self
            .set
            .iter()
            .filter(|s| !(s.key == "device" && other_backend))
            // Leaks once per process, and the value is used until its end.
            .map(|s| (option(s.key), &*s.value.clone().leak()))
            .collect();
        command.mut_subcommands(|sub| with_defaults(sub, &set))
    }

    fn find(&self, key: &str) -> Option<&Setting> {
        self.set.iter().find(|s| s.key == key)
    }
}

fn option(key: &str) -> &'static str {
    KEYS.iter().find(|(known, _)| *known == key).expect("keys are checked when they are read").1
}

fn with_defaults(command: Command, set: &[(&str, &'static str)]) -> Command {
    let command = command.mut_subcommands(|sub| with_defaults(sub, set));
    set.iter().fold(command, |command, (long, value)| {
        let id = command.get_arguments().find(|a| a.get_long() == Some(long)).map(|a| a.get_id().clone());
        match id {
            Some(id) => command.mut_arg(id, |arg| arg.default_value(*value)),
            None => command,
        }
    })
}

fn place() -> Option<PathBuf> {
    let var = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let config = if cfg!(windows) {
        var("APPDATA")?
    } else {
        var("XDG_CONFIG_HOME").or_else(|| Some(var("HOME")?.join(".config")))?
    };
    Some(config.join("selkie").join("config.json"))
}

fn parse(path: &Path, bytes: &[u8]) -> Result<Vec<Setting>, String> {
    let from = path.display().to_string();
    let object: Map<String, Value> =
        serde_json::from_slice(bytes).map_err(|e| format!("{from}: not a JSON object of options: {e}"))?;
    object.into_iter().map(|(key, value)| setting(&from, &key, value)).collect()
}

fn setting(from: &str, key: &str, value: Value) -> Result<Setting, String> {
    let Some((key, long)) = KEYS.into_iter().find(|(known, _)| *known == key) else {
        let near = KEYS.iter().map(|(known, _)| (strsim::damerau_levenshtein(key, known), *known)).min();
        let hint = match near {
            Some((apart, known)) if apart <= known.len().div_ceil(3) => format!("did you mean `{known}`?"),
            _ => format!("the keys are {}", KEYS.map(|(known, _)| known).join(", ")),
        };
        return Err(format!("{from}: there is no key `{key}`; {hint}"));
    };
    let value = match value {
        Value::String(text) if key == "model" => home(text),
        Value::String(text) => text,
        Value::Number(number) => number.to_string(),
        other => return Err(format!("{from}: key `{key}`: expected text or a number, found {other}")),
    };
    // The option itself checks the value; `chat` has all of these options.
    let line = [OsStr::new("selkie"), "chat".as_ref(), format!("--{long}={value}").as_ref()].map(OsStr::to_owned);
    match Cli::try_parse_from(line) {
        Ok(_) => Ok(Setting { key, value, from: from.to_owned() }),
        Err(e) => {
            let text = e.to_string();
            let why = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
            Err(format!("{from}: key `{key}`: {why}"))
        }
    }
}

/// `~/` is the home directory, as in a shell.
fn home(path: String) -> String {
    let home = env::var_os(if cfg!(windows) { "USERPROFILE" } else { "HOME" });
    match (path.strip_prefix("~/"), home.map(PathBuf::from).as_deref().and_then(Path::to_str)) {
        (Some(rest), Some(home)) => format!("{home}/{rest}"),
        _ => path,
    }
}

/// Prints every key with its value and its origin.
pub fn run(args: &ConfigArgs) -> Outcome {
    let settings = Settings::load().map_err(Failure::Usage)?;
    let mut out = Output::new();
    let file = settings.file.as_ref().map(|path| path.display().to_string());
    if args.json {
        let values: Map<String, Value> = KEYS
            .iter()
            .filter_map(|(key, _)| settings.find(key))
            .map(|s| (s.key.to_owned(), json!({ "value": s.value, "from": s.from })))
            .collect();
        return out.json(&json!({ "file": file, "set": values }));
    }
    let there = settings.file.as_ref().is_some_and(|path| path.exists());
    let missing = if there { "" } else { " (not there)" };
    out.line(&format!(
        "{:<20}{}{missing}",
        "file",
        file.as_deref().unwrap_or("none: neither HOME nor XDG_CONFIG_HOME")
    ))?;
    for (key, _) in KEYS {
        let text = match settings.find(key) {
            Some(s) => format!("{:<30} from {}", s.value, s.from),
            None => "default".into(),
        };
        out.line(&format!("{key:<20}{text}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, FromArgMatches};

    use super::*;
    use crate::args;

    fn parsed(text: &str) -> Result<Vec<Setting>, String> {
        parse(Path::new("config.json"), text.as_bytes())
    }

    fn chat(settings: &Settings, line: &[&str]) -> args::ChatArgs {
        let line: Vec<OsString> = ["selkie", "chat"].iter().chain(line).map(OsString::from).collect();
        let matches = settings.apply(Cli::command(), &line).try_get_matches_from(line).unwrap();
        let args::Command::Chat(chat) = Cli::from_arg_matches(&matches).unwrap().command else { panic!() };
        chat
    }

    #[test]
    fn settings_are_defaults_of_options() {
        let set = parsed(
            r#"{"model": "/m", "backend": "wgpu", "device": "H100", "memory": "4GiB", "temperature": 0.7,
                "when_full": "drop-oldest", "context": 4096}"#,
        );
        let settings = Settings { file: None, set: set.unwrap() };
        let given = chat(&settings, &["--temperature", "0", "-m", "/other"]);
        assert_eq!(given.model.model.as_deref(), Some("/other".as_ref()));
        assert_eq!(given.sampling.temperature, Some(0.0));
        let default = chat(&settings, &[]);
        assert_eq!(default.model.model.as_deref(), Some("/m".as_ref()));
        assert_eq!(default.model.backend.name, args::BackendName::Wgpu);
        assert_eq!(default.model.backend.adapter.as_deref(), Some("H100"));
        assert_eq!((default.pool.memory, default.pool.context), (Some(4 << 30), Some(4096)));
        assert_eq!(default.sampling.temperature, Some(0.7));
        assert_eq!(default.when_full, args::WhenFullArg::DropOldest);
        // The device belongs to the backend of the file.
        assert_eq!(chat(&settings, &["--backend", "cpu"]).model.backend.adapter, None);
        assert_eq!(chat(&settings, &["--gpus=0,1"]).model.backend.adapter, None);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, needles) in [
            (r#"{"modle": "x"}"#, &["config.json", "no key `modle`", "did you mean `model`?"][..]),
            (r#"{"colour": "x"}"#, &["no key `colour`", "the keys are model, backend"]),
            (r#"{"memory": "4 apples"}"#, &["key `memory`", "unknown unit"]),
            (r#"{"backend": "tpu"}"#, &["key `backend`", "tpu"]),
            (r#"{"context": 0}"#, &["key `context`", "at least 1"]),
            (r#"{"context": [1]}"#, &["key `context`", "expected text or a number"]),
            ("[]", &["not a JSON object"]),
        ] {
            let why = parsed(text).unwrap_err();
            for needle in needles {
                assert!(why.contains(needle), "{why}");
            }
        }
    }
}
