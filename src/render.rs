//! Chat templates are rendered in a separate process of this program: a template is not trusted, and
//! exhausting that process's memory, stack or time ends only one request.
//!
//! A job and its answer are a line of JSON each. A process waits for the next job; each thread that has a job at the same time
//! has its own process.

use std::{
    io::{self, BufRead, BufReader, BufWriter, Read, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    time::Duration,
};

use selkie_core::chat::render::{InProcess, Job, Rendered, Renderer, unusable};

use crate::failure::{Failure, Outcome};

/// How long rendering a chat may take; ordinary templates take milliseconds.
const DEADLINE: Duration = Duration::from_secs(5);
/// Address space of the process in bytes; 64 MiB of it is a stack.
#[cfg(unix)]
const MEMORY: u64 = 1 << 30;
/// Longest line in bytes. A job's texts are bounded, and JSON makes six bytes of one at most.
const MAX_LINE: u64 = 1 << 30;

type Answer = Result<Rendered, String>;

/// Renders in other processes.
#[derive(Default)]
pub struct Processes {
    idle: Mutex<Vec<Process>>,
}

/// Whether this process is another program, which cannot render for itself.
static HERE: AtomicBool = AtomicBool::new(false);

/// Templates are rendered in this process from now on.
pub fn stay_here() {
    HERE.store(true, Ordering::Relaxed);
}

impl Processes {
    /// None if this process cannot start itself once more.
    pub fn new() -> Option<Self> {
        (!HERE.load(Ordering::Relaxed)).then(Self::default)
    }
}

impl Renderer for Processes {
    fn render(&self, job: &Job<'_>) -> Answer {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = idle().pop();
        let mut process = match kept.and_then(Process::if_alive) {
            Some(process) => process,
            None => Process::start().map_err(|e| {
                format!("a process to render the chat template in could not be started: {e}; --raw does without")
            })?,
        };
        let answer = process.render(job)?;
        idle().push(process);
        answer
    }
}

/// A process that waits for jobs. It ends with this value.
struct Process {
    child: Child,
    jobs: BufWriter<ChildStdin>,
    answers: Receiver<io::Result<String>>,
}

impl Process {
    fn start() -> io::Result<Self> {
        let mut command = Command::new(this_program()?);
        command.arg(crate::args::RENDER).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        alone(&mut command);
        let mut child = command.spawn()?;
        let jobs = BufWriter::new(child.stdin.take().expect("it is piped"));
        let mut out = BufReader::new(child.stdout.take().expect("it is piped"));
        let (send, answers) = channel();
        let read = move || {
            loop {
                let line = read_line(&mut out);
                let last = !matches!(&line, Ok(Some(_)));
                if send.send(line.map(Option::unwrap_or_default)).is_err() || last {
                    return;
                }
            }
        };
        let process = Self { child, jobs, answers };
        std::thread::Builder::new().name("answers".into()).spawn(read)?;
        Ok(process)
    }

    /// Itself, if it has not ended meanwhile.
    fn if_alive(mut self) -> Option<Self> {
        matches!(self.child.try_wait(), Ok(None)).then_some(self)
    }

    /// # Errors
    /// The process did not answer, and is of no use any more.
    fn render(&mut self, job: &Job<'_>) -> Result<Answer, String> {
        let sent = serde_json::to_writer(&mut self.jobs, job).map_err(io::Error::from);
        let sent = sent.and_then(|()| self.jobs.write_all(b"\n")).and_then(|()| self.jobs.flush());
        let line = match self.answers.recv_timeout(DEADLINE) {
            Ok(Ok(line)) => line,
            Err(RecvTimeoutError::Timeout) => {
                return Err(unusable(&format!("rendering it takes more than {} seconds", DEADLINE.as_secs())));
            }
            Ok(Err(_)) | Err(RecvTimeoutError::Disconnected) => String::new(),
        };
        let answer = serde_json::from_str(&line).ok().filter(|_| sent.is_ok());
        // Its last words, if any, would be about this program.
        answer.ok_or_else(|| unusable("rendering it takes too much memory, or its values are nested too deeply"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// This very program, even if its file was replaced.
fn this_program() -> io::Result<std::path::PathBuf> {
    if cfg!(target_os = "linux") { Ok("/proc/self/exe".into()) } else { std::env::current_exe() }
}

/// Ctrl-C is for this process.
#[cfg(unix)]
fn alone(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    command.process_group(0);
}

#[cfg(windows)]
fn alone(command: &mut Command) {
    use std::os::windows::process::CommandExt;
    const CREATE_NEW_PROCESS_GROUP: u32 = 0x200;
    command.creation_flags(CREATE_NEW_PROCESS_GROUP);
}

/// A line; `None` at the end of the stream.
fn read_line(from: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut line = String::new();
    from.take(MAX_LINE).read_line(&mut line)?;
    Ok(line.ends_with('\n').then_some(line))
}

/// The other side: answers jobs until its input ends.
pub fn run() -> Outcome {
    limit_memory();
    let (mut jobs, mut answers) = (io::stdin().lock(), io::stdout().lock());
    let renderer = InProcess::default();
    while let Some(line) = read_line(&mut jobs).map_err(|e| Failure::Other(format!("standard input: {e}")))? {
        let job: Job<'_> = serde_json::from_str(&line).map_err(|e| Failure::Other(format!("standard input: {e}")))?;
        let (done, ended) = channel::<()>();
        // If the parent process has ended, nothing else ends this one.
        std::thread::spawn(move || {
            if ended.recv_timeout(DEADLINE + Duration::from_secs(1)) == Err(RecvTimeoutError::Timeout) {
                std::process::exit(1);
            }
        });
        let answer = renderer.render(&job);
        drop(done);
        let text = serde_json::to_string(&answer).map_err(|e| Failure::Other(e.to_string()))?;
        writeln!(answers, "{text}").and_then(|()| answers.flush()).map_err(Failure::output)?;
    }
    Ok(())
}

/// The system refuses larger allocations, which ends this process. A core file would be useless.
#[cfg(unix)]
fn limit_memory() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    for (resource, most) in [(Resource::As, MEMORY), (Resource::Core, 0)] {
        let most = getrlimit(resource).maximum.map_or(most, |hard| hard.min(most));
        // Where the system has no such limit, the deadline remains.
        let _ = setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) });
    }
}

/// There is no such limit here; the deadline remains.
#[cfg(not(unix))]
fn limit_memory() {}
