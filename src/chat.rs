//! `selkie chat`: several turns with one model. Each turn continues from the state of the previous ones.

use std::{
    io::Write,
    path::Path,
    sync::{Arc, atomic::Ordering},
};

use selkie_core::{
    Error,
    bundle::Reader,
    chat::Message,
    model_dir::ModelFiles,
    session::{Ask, Completion, Model, Prompt, Text, WhenFull},
    units::thousands,
};

use crate::{
    args::ChatArgs,
    bundle,
    failure::{Failure, Outcome},
    generate, model,
    output_file::OutputFile,
    terminal::{self, Output},
};
use command::Values;
use input::{INTERRUPTED, Input};

mod command;
mod input;

/// Temperature of a retry if the model's own values always give the same answer, as on the page.
const RETRY_TEMPERATURE: f32 = 0.7;
const RETRY_TOP_P: f32 = 0.95;

/// Runs the conversation until the input ends.
pub fn run(args: &ChatArgs) -> Outcome {
    let files = model::open(&args.model)?;
    let text = Text::new(&files)?;
    text.chat()?;
    text.tokenizer()?;
    let Ask { sampling, max_tokens, stop, .. } = generate::ask(&args.sampling, &text)?;
    let values = Values { sampling: text.sampling(&sampling)?, max_tokens, stop, when_full: args.when_full.into() };
    let options = model::engine_options_of_long_runs(&args.pool, 1);
    bundle::check_exact(args.exact_only, &options)?;
    // A file that cannot be used is refused before minutes of loading.
    let saved = args.load.as_deref().map(bundle::open).transpose()?;
    let (mut system, mut messages) = (args.system.clone(), Vec::new());
    if let Some(saved) = &saved {
        (system, messages) = said(saved)?;
    }
    let model = model::load(&args.model.backend, &files, &options)?;
    let origin = match saved {
        Some(saved) => bundle::insert(&model, &files, saved, args.exact_only)?.origin,
        None => String::new(),
    };
    let mut input = Input::new()?;
    let mut talk = Conversation {
        model,
        files,
        origin,
        values,
        out: Output::prose(),
        fixed_seed: args.sampling.seed.is_some(),
        fixed_temperature: args.sampling.temperature.is_some(),
        system,
        messages,
        totals: Totals::default(),
    };
    if input.is_interactive() {
        terminal::dim_note(talk.greeting());
    }
    while let Some(message) = input.message()? {
        match talk.turn(&message) {
            Ok(true) => {}
            Ok(false) => break,
            // A person can continue after, for example, a message that is too long; a script should not.
            Err(failure @ (Failure::Engine(_) | Failure::Other(_))) if input.is_interactive() => {
                terminal::error(failure.message().unwrap_or_default());
            }
            Err(failure) => return Err(failure),
        }
    }
    match &args.save {
        Some(file) => talk.save_state(file),
        None => Ok(()),
    }
}

/// System prompt and messages of a bundle.
fn said(saved: &Reader<'_>) -> Outcome<(Option<String>, Vec<Message>)> {
    let file = saved.file();
    let Some(text) = &saved.head().messages else {
        let why = format!("{file}: this bundle holds no conversation; `selkie batch --warm {file}` can begin with it");
        return Err(Failure::Other(why));
    };
    let messages: Result<Vec<Message>, _> = serde_json::from_str(text);
    let mut messages = messages.map_err(|e| Failure::Other(format!("{file}: its conversation is not valid: {e}")))?;
    let first = messages.first().is_some_and(|m| m.role == "system");
    let system = first.then(|| messages.remove(0).content);
    Ok((system, messages))
}

/// Counters for `/stats`.
#[derive(Default)]
struct Totals {
    turns: usize,
    prompt: usize,
    reused: usize,
    generated: usize,
    /// Tokens of the last prompt with its answer.
    length: usize,
}

struct Conversation {
    model: Model,
    files: Arc<ModelFiles>,
    /// Of the converted values that the conversation began with; else empty.
    origin: String,
    values: Values,
    out: Output,
    /// The user chose the seed, so retrying keeps it.
    fixed_seed: bool,
    /// The user chose the temperature, so retrying keeps it.
    fixed_temperature: bool,
    system: Option<String>,
    /// User and assistant in turn, without the system prompt.
    messages: Vec<Message>,
    totals: Totals,
}

impl Conversation {
    fn greeting(&self) -> String {
        let facts = self.model.facts();
        let (name, context) = (&facts.name, thousands(facts.context));
        format!(
            "{name} on {} ({}), {context} tokens of context. /help lists the commands.",
            facts.backend, facts.device
        )
    }

    /// Handles one message or command; false ends the conversation.
    fn turn(&mut self, line: &str) -> Outcome<bool> {
        let text = match line.strip_prefix('/') {
            Some(text) if text.starts_with('/') => text,
            Some(command) => return self.command(command.trim()),
            None => line,
        };
        if !text.trim().is_empty() {
            self.messages.push(Message::new("user", text));
            self.answer(&self.values.clone())?;
        }
        Ok(true)
    }

    fn command(&mut self, command: &str) -> Outcome<bool> {
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        match (&*name.to_lowercase(), rest.trim()) {
            ("exit" | "quit" | "bye", "") => return Ok(false),
            ("help", "") => terminal::note(command::HELP),
            ("reset" | "clear", "") => {
                self.messages.clear();
                terminal::hint("The conversation begins anew.");
            }
            ("system", "") => terminal::note(self.system.as_deref().unwrap_or("There is no system prompt.")),
            ("system", text) => {
                self.system = Some(text.to_owned());
                self.messages.clear();
                terminal::hint("The system prompt is set, and the conversation begins anew.");
            }
            ("retry", "") => self.retry()?,
            ("set", "") => terminal::note(command::values(&self.values)),
            ("set", rest) => self.set(rest),
            ("stats", "") => terminal::note(self.stats()),
            ("save", "") => terminal::note("/save takes the name of a file, for example /save chat.md"),
            ("save", file) if Path::new(file).extension().is_some_and(|end| end == "bundle") => {
                if let Err(failure) = self.save_state(Path::new(file)) {
                    terminal::error(failure.message().unwrap_or_default());
                }
            }
            ("save", file) => match self.save(Path::new(file)) {
                Ok(()) => terminal::hint(format_args!("The conversation is in {file}.")),
                Err(e) => terminal::error(e),
            },
            (name, _) => match command::nearest(name) {
                Some(near) if near != name => {
                    terminal::note(format_args!("There is no command /{name}; did you mean /{near}?"));
                }
                Some(near) => terminal::note(format_args!("/{near} takes nothing after it.")),
                None => terminal::note(format_args!("There is no command /{name}; /help lists them.")),
            },
        }
        Ok(true)
    }

    fn set(&mut self, rest: &str) {
        let (name, value) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        match command::set(&mut self.values, name, value.trim()) {
            Ok(name) => {
                self.fixed_temperature |= name == "temperature";
                self.fixed_seed |= name == "seed";
                terminal::hint(format_args!("{name} is {} from now on.", value.trim()));
            }
            Err(why) => terminal::note(why),
        }
    }

    /// Answers the last message again: with the next seed and, where that would give the same answer, at another temperature.
    fn retry(&mut self) -> Outcome {
        self.messages.pop_if(|m| m.role == "assistant");
        if self.messages.is_empty() {
            terminal::note("There is nothing to answer again.");
            return Ok(());
        }
        if !self.fixed_seed {
            self.values.sampling.seed = self.values.sampling.seed.wrapping_add(1);
        }
        let mut values = self.values.clone();
        if values.sampling.is_greedy() && !self.fixed_temperature && !self.fixed_seed {
            (values.sampling.temperature, values.sampling.top_p) = (RETRY_TEMPERATURE, RETRY_TOP_P);
            terminal::dim_note("another try, at temperature 0.7: at 0, the model's own, it would be the same");
        } else if values.sampling.is_greedy() {
            terminal::dim_note("at temperature 0 the answer is the same every time; /set temperature 0.7 samples");
        }
        self.answer(&values)
    }

    fn stats(&self) -> String {
        let (t, now) = (&self.totals, self.model.stats());
        let [turns, prompt, reused, generated, length] =
            [t.turns, t.prompt, t.reused, t.generated, t.length].map(thousands);
        let drafts = &now.counters.drafts;
        let guessed = match drafts.tokens {
            0 => String::new(),
            n => format!("{} of {} guessed tokens were right\n", thousands(drafts.accepted()), thousands(n)),
        };
        format!(
            "{turns} answers, {generated} tokens generated\n{guessed}{reused} of {prompt} prompt tokens reused\n\
             {length} of {} tokens of context used\n{} states and {} pages of 64 tokens cached",
            thousands(self.model.facts().context),
            thousands(now.slots_cached),
            thousands(now.pages_cached),
        )
    }

    /// All messages with the system prompt.
    fn all(&self) -> Vec<Message> {
        let system = self.system.iter().map(|s| Message::new("system", s.as_str()));
        system.chain(self.messages.iter().cloned()).collect()
    }

    /// Writes the conversation with what the cache holds of it.
    fn save_state(&self, path: &Path) -> Outcome {
        let messages = self.all();
        if messages.is_empty() {
            return Err(Failure::Other(format!("{}: there is no conversation to save yet", path.display())));
        }
        let text = serde_json::to_string(&messages).map_err(|e| Failure::Other(e.to_string()))?;
        // As the next turn's prompt will begin.
        let encoded = self.model.encode(bundle::whole(messages), WhenFull::Error, None)?;
        let origin = self.origin.clone();
        let saved = bundle::save(&self.model, &self.files, path, encoded, Some(text), origin, bundle::STATES)?;
        terminal::dim_note(bundle::saved_line(&saved, path));
        Ok(())
    }

    fn save(&self, path: &Path) -> Result<(), Error> {
        let text = if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json")) {
            format!("{:#}\n", serde_json::json!({ "messages": self.all() }))
        } else {
            let heading = |role: &str| match role {
                "system" => "System",
                "user" => "You",
                _ => "Model",
            };
            let turns = self.all().into_iter().map(|m| format!("## {}\n\n{}\n", heading(&m.role), m.content.trim()));
            turns.collect::<Vec<_>>().join("\n")
        };
        let mut file = OutputFile::create(path)?;
        file.write_all(text.as_bytes()).map_err(|e| file.error(e))?;
        file.commit()
    }

    /// Answers the last message, which must be the user's; on an error that message is forgotten.
    fn answer(&mut self, values: &Values) -> Outcome {
        let ask = Ask { origin: self.origin.clone(), ..values.ask(Prompt::Messages(self.all())) };
        INTERRUPTED.store(false, Ordering::Relaxed);
        let mut text = String::new();
        let outcome = self.model.submit(ask).map_err(Failure::from).and_then(|answer| {
            generate::answer(&self.model, answer, &INTERRUPTED, |piece, _| {
                text += piece;
                self.out.text(piece)
            })
        });
        let done = match outcome {
            Ok(done) => done,
            Err(failure) => {
                self.messages.pop();
                return Err(self.not_sent(failure));
            }
        };
        self.out.end()?;
        if !text.ends_with('\n') {
            self.out.text("\n")?;
        }
        // The next turn continues from this one, so these messages stay left out.
        self.messages.drain(..done.dropped);
        self.messages.push(Message::new("assistant", text));
        self.totals.add(&done);
        terminal::dim_note(generate::short_line(&done));
        if done.dropped > 0 {
            let kept = if self.system.is_some() { "the system prompt is reused, the rest" } else { "what is left" };
            terminal::dim_note(format_args!(
                "the context was full: the oldest {} messages are left out from now on; {kept} was computed again",
                done.dropped
            ));
        }
        Ok(())
    }

    /// The failure in the words of a chat.
    fn not_sent(&self, failure: Failure) -> Failure {
        let Failure::Engine(Error::TooLong { why, tokens }) = failure else { return failure };
        let Some((tokens, answer, most)) = tokens else {
            return Failure::Other(format!("{why}. Your message was not sent."));
        };
        let fit = match most.saturating_sub(answer) {
            _ if tokens > most => format!("{} fit", thousands(most)),
            left => format!("{} fit with an answer of {} tokens", thousands(left), thousands(answer)),
        };
        let tokens = thousands(tokens);
        // The message has already been removed.
        Failure::Other(if self.messages.is_empty() || self.values.when_full == WhenFull::DropOldest {
            format!("Your message is {tokens} tokens; {fit}. It was not sent.")
        } else {
            format!(
                "The conversation with your message is {tokens} tokens; {fit}. It was not sent. \
                 /set when-full drop-oldest leaves out the oldest turns, /reset begins anew."
            )
        })
    }
}

impl Totals {
    fn add(&mut self, done: &Completion) {
        self.turns += 1;
        self.prompt += done.end.prompt_tokens;
        self.reused += done.reused();
        self.generated += done.ids.len();
        self.length = done.end.prompt_tokens + done.ids.len();
    }
}
