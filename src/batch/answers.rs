//! The output of answers: a file that is complete or can be resumed with `--resume`, or a stream.

use std::{collections::BTreeMap, io::Write, path::Path};

use selkie_core::units::thousands;

use super::{journal::Journal, request::Line};
use crate::{
    args::BatchArgs,
    failure::{Failure, Outcome},
    output_file::{self, OutputFile},
    terminal::Output,
};

/// The answers of a run.
pub struct Answers {
    sink: Sink,
    /// Whether answers are in the order of the requests instead of the order of completion.
    ordered: bool,
    of: usize,
}

enum Sink {
    Journal(Journal),
    Stream(Stream),
}

/// A stream shows answers in the order in which they are written.
struct Stream {
    to: To,
    /// Answers that wait for those of earlier requests.
    ready: BTreeMap<usize, String>,
    next: usize,
    written: usize,
}

enum To {
    Stdout(Output),
    Special(OutputFile),
}

impl Answers {
    /// Opens the output that the arguments name, with the answers of an earlier run if it is resumed.
    ///
    /// # Errors
    /// If it cannot be written or, to resume an earlier run, cannot be read.
    pub fn open(args: &BatchArgs, output: &Path, lines: &[Line]) -> Outcome<Self> {
        let stream = |to| Sink::Stream(Stream { to, ready: BTreeMap::new(), next: 0, written: 0 });
        let stdout = output.as_os_str() == "-";
        if args.resume && (stdout || output_file::is_special(output)) {
            return Err(Failure::Usage(
                "--resume needs a file as --output, in which the answers of the earlier run are".into(),
            ));
        }
        let sink = if stdout {
            stream(To::Stdout(Output::new()))
        } else if output_file::is_special(output) && !output.is_dir() {
            stream(To::Special(OutputFile::create(output)?))
        } else if args.resume {
            Sink::Journal(Journal::resume(output, lines)?)
        } else {
            Sink::Journal(Journal::start(output)?)
        };
        Ok(Self { sink, ordered: !args.unordered, of: lines.len() })
    }

    /// For each request, whether it was answered by an earlier run.
    pub fn answered(&self) -> Vec<bool> {
        let mut answered = vec![false; self.of];
        if let Sink::Journal(journal) = &self.sink {
            journal.answered().for_each(|request| answered[request] = true);
        }
        answered
    }

    /// Takes the answer to a request.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn add(&mut self, request: usize, line: String) -> Outcome {
        match &mut self.sink {
            Sink::Journal(journal) => journal.add(request, &line),
            Sink::Stream(stream) if self.ordered => {
                stream.ready.insert(request, line);
                while let Some(line) = stream.ready.remove(&stream.next) {
                    stream.write(&line)?;
                    stream.next += 1;
                }
                Ok(())
            }
            Sink::Stream(stream) => stream.write(&line),
        }
    }

    /// Ends a run that has answered everything.
    ///
    /// # Errors
    /// If the output cannot be completed.
    pub fn finish(self) -> Outcome {
        match self.sink {
            Sink::Journal(journal) => journal.finish(self.ordered),
            Sink::Stream(stream) => match stream.to {
                To::Stdout(_) => Ok(()),
                To::Special(file) => Ok(file.commit()?),
            },
        }
    }

    /// Ends a run that has not answered everything: says how many answers there are, and where.
    pub fn stop(self) -> String {
        let of = thousands(self.of);
        match self.sink {
            Sink::Journal(journal) => match journal.len() {
                0 => format!("none of {of} requests was answered"),
                n => {
                    let n = thousands(n);
                    let path = journal.path().display();
                    format!("{n} of {of} requests are answered, in {path}; --resume goes on from there")
                }
            },
            Sink::Stream(mut stream) => {
                // Complete, although the answer to an earlier request is missing.
                for line in std::mem::take(&mut stream.ready).into_values() {
                    if stream.write(&line).is_err() {
                        break;
                    }
                }
                format!("{} of {of} answers were written", thousands(stream.written))
            }
        }
    }
}

impl Stream {
    fn write(&mut self, line: &str) -> Outcome {
        match &mut self.to {
            To::Stdout(out) => out.line(line)?,
            To::Special(file) => writeln!(file, "{line}").and_then(|()| file.flush()).map_err(|e| file.error(e))?,
        }
        self.written += 1;
        Ok(())
    }
}
