//! `selkie chat`: several turns with one model. Each turn continues from the state of the previous ones.

use std::{
    io::{self, BufRead, IsTerminal},
    path::PathBuf,
    rc::Rc,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, Ordering},
    },
};

use rustyline::{DefaultEditor, error::ReadlineError};
use selkie_core::{
    backend::Backend,
    chat::Message,
    model_dir::ModelFiles,
    session::{Ask, Prompt, Session},
    tokenizer::MAX_TEXT_BYTES,
};

use crate::{
    args::ChatArgs,
    backend::{self, Job},
    failure::{Failure, Outcome},
    generate, model,
    terminal::{self, Output},
};

const HELP: &str = "/system TEXT   set the system prompt and start anew (without TEXT: show it)
/retry         answer the last message again, from the state before the answer
/reset         forget the conversation, keep the system prompt
/help          show this
/exit          leave (also Ctrl-D)
A message that begins with a slash is written with two. Ctrl-C stops an answer.";

/// Set by Ctrl-C while an answer is being generated.
static INTERRUPTED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// Runs the conversation until the input ends.
pub fn run(args: &ChatArgs) -> Outcome {
    let files = model::open(&args.model)?;
    files.chat()?;
    files.tokenizer()?;
    let ask = generate::ask(&args.sampling, &files)?;
    backend::run(&args.model.backend, Chat { args, files: &files, ask })
}

struct Chat<'a> {
    args: &'a ChatArgs,
    files: &'a Rc<ModelFiles>,
    ask: Ask,
}

impl Job for Chat<'_> {
    type Out = ();

    fn run<B: Backend>(self, backend: B) -> Outcome {
        let options = model::engine_options(&self.args.pool, 1);
        let session = model::load(backend, self.files, &options)?;
        let mut input = Input::new()?;
        let mut talk = Conversation {
            session,
            ask: self.ask,
            out: Output::new(),
            fixed_seed: self.args.sampling.seed.is_some(),
            system: self.args.system.clone(),
            messages: Vec::new(),
        };
        if input.is_interactive() {
            terminal::note("/help lists the commands.");
        }
        while let Some(line) = input.line()? {
            match talk.turn(&line) {
                Ok(true) => {}
                Ok(false) => break,
                // A person can continue after, for example, a message that is too long; a script should not.
                Err(failure @ (Failure::Engine(_) | Failure::Other(_))) if input.is_interactive() => {
                    terminal::error(failure.message().unwrap_or_default());
                }
                Err(failure) => return Err(failure),
            }
        }
        Ok(())
    }
}

struct Conversation<B: Backend> {
    session: Session<B>,
    ask: Ask,
    out: Output,
    /// The user chose the seed, so retrying keeps it.
    fixed_seed: bool,
    system: Option<String>,
    /// User and assistant in turn, without the system prompt.
    messages: Vec<Message>,
}

impl<B: Backend> Conversation<B> {
    /// Handles one line of input; false ends the conversation.
    fn turn(&mut self, line: &str) -> Outcome<bool> {
        let text = match line.strip_prefix('/') {
            Some(text) if text.starts_with('/') => text,
            Some(command) => return self.command(command.trim()),
            None => line,
        };
        if !text.trim().is_empty() {
            self.messages.push(Message::new("user", text));
            self.answer()?;
        }
        Ok(true)
    }

    fn command(&mut self, command: &str) -> Outcome<bool> {
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        match (name, rest.trim()) {
            ("exit" | "quit", "") => return Ok(false),
            ("help", "") => terminal::note(HELP),
            ("reset", "") => self.messages.clear(),
            ("system", "") => terminal::note(self.system.as_deref().unwrap_or("There is no system prompt.")),
            ("system", text) => {
                self.system = Some(text.to_owned());
                self.messages.clear();
            }
            ("retry", "") => {
                self.messages.pop_if(|m| m.role == "assistant");
                if self.messages.is_empty() {
                    terminal::note("There is nothing to answer again.");
                } else {
                    if !self.fixed_seed {
                        self.ask.sampling.seed = self.ask.sampling.seed.wrapping_add(1);
                    }
                    self.answer()?;
                }
            }
            _ => terminal::note(format_args!("There is no command /{command}; /help lists them.")),
        }
        Ok(true)
    }

    /// Answers the last message, which must be the user's; on an error that message is forgotten.
    fn answer(&mut self) -> Outcome {
        let system = self.system.iter().map(|s| Message::new("system", s.as_str()));
        let messages = system.chain(self.messages.iter().cloned()).collect();
        let ask = Ask { prompt: Prompt::Messages(messages), ..self.ask.clone() };
        INTERRUPTED.store(false, Ordering::Relaxed);
        let mut text = String::new();
        let outcome = self.session.submit(ask).map_err(Failure::from).and_then(|id| {
            generate::answer(&mut self.session, id, &INTERRUPTED, |piece| {
                text += piece;
                self.out.text(piece)
            })
        });
        let done = match outcome {
            Ok(done) => done,
            Err(failure) => {
                self.messages.pop();
                return Err(failure);
            }
        };
        if !text.ends_with('\n') {
            self.out.text("\n")?;
        }
        self.messages.push(Message::new("assistant", text));
        terminal::dim_note(generate::closing_line(&done, &self.session));
        Ok(())
    }
}

/// Where the user's lines come from.
enum Input {
    Editor { editor: Box<DefaultEditor>, history: Option<PathBuf> },
    Plain(io::StdinLock<'static>),
}

impl Input {
    fn new() -> Outcome<Self> {
        if !io::stdin().is_terminal() {
            return Ok(Self::Plain(io::stdin().lock()));
        }
        let failed = |e: &dyn std::fmt::Display| Failure::Other(format!("the terminal: {e}"));
        signal_hook::flag::register(signal_hook::consts::SIGINT, INTERRUPTED.clone()).map_err(|e| failed(&e))?;
        let mut editor = Box::new(DefaultEditor::new().map_err(|e| failed(&e))?);
        let history = history_file();
        if let Some(path) = &history
            && let Err(e) = editor.load_history(path)
        {
            tracing::debug!("no history: {}: {e}", path.display());
        }
        Ok(Self::Editor { editor, history })
    }

    fn is_interactive(&self) -> bool {
        matches!(self, Self::Editor { .. })
    }

    /// The next line; `None` at the end of the input.
    fn line(&mut self) -> Outcome<Option<String>> {
        match self {
            Self::Plain(from) => plain_line(from).map_err(|e| Failure::Other(format!("standard input: {e}"))),
            Self::Editor { editor, history } => loop {
                match editor.readline("> ") {
                    Ok(line) => {
                        remember(editor, history.as_deref(), &line);
                        return Ok(Some(line));
                    }
                    Err(ReadlineError::Interrupted) => terminal::note("Ctrl-D or /exit leaves."),
                    Err(ReadlineError::Eof) => return Ok(None),
                    Err(e) => return Err(Failure::Other(format!("the terminal: {e}"))),
                }
            },
        }
    }
}

/// A line without its end, of a length that can be a message.
fn plain_line(from: impl BufRead) -> io::Result<Option<String>> {
    let most = MAX_TEXT_BYTES as u64;
    let mut line = Vec::new();
    if from.take(most + 1).read_until(b'\n', &mut line)? == 0 {
        return Ok(None);
    }
    if line.len() as u64 > most {
        let why = format!("a line of more than {most} bytes is too long for a message");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    let text = String::from_utf8(line).map_err(|e| {
        let why = format!("not UTF-8 from byte {} of a line on", e.utf8_error().valid_up_to());
        io::Error::new(io::ErrorKind::InvalidData, why)
    })?;
    let text = text.strip_suffix('\n').unwrap_or(&text);
    Ok(Some(text.strip_suffix('\r').unwrap_or(text).to_owned()))
}

/// The history is a convenience, so errors are ignored.
fn remember(editor: &mut DefaultEditor, history: Option<&std::path::Path>, line: &str) {
    if line.trim().is_empty() || !editor.add_history_entry(line).unwrap_or(false) {
        return;
    }
    if let Some(path) = history
        && let Err(e) = editor.save_history(path)
    {
        tracing::debug!("the history is not kept: {}: {e}", path.display());
    }
}

/// `selkie/history` in the user's directory for program state, which is made if need be.
fn history_file() -> Option<PathBuf> {
    // The specification of these variables says that relative paths must be ignored.
    let var = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = if cfg!(windows) {
        var("LOCALAPPDATA")?
    } else {
        var("XDG_STATE_HOME").or_else(|| Some(var("HOME")?.join(".local/state")))?
    };
    let dir = state.join("selkie");
    std::fs::create_dir_all(&dir).ok()?;
    Some(dir.join("history"))
}
