//! Ranks in processes of their own.
//!
//! Rank 0 listens at the rendezvous. The process of every other rank connects to it twice: for the commands that its rank follows,
//! with their answers, and for what the ranks tell one another. So on rank 0's side a rank elsewhere looks like one in a thread,
//! and there is one group of ranks, in rank 0's process.
//!
//! Each side says now and then that it is there. Nothing is encrypted, and a rank does what rank 0 says.

use std::{
    collections::VecDeque,
    convert::Infallible,
    io::{self, Read},
    net::{Shutdown, TcpListener, TcpStream, ToSocketAddrs},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, channel, sync_channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    Arriving, DEADLINE, Link, Member, RankDevice, check_number,
    rank::{Answer, Command, Opened, Started, Told, spawn, start},
    wire::{Fault, Head, Hello, Order, Reply, Say, Way, lost, program, receive, send},
};
use crate::{
    backend::LOOK,
    cpu::Group,
    error::{Error, Result},
};

/// How long a side may be silent that says every [`LOOK`] that it is there, or not read what it is sent.
const SILENCE: Duration = Duration::from_secs(20);

/// How long whoever comes to the rendezvous may take to say who it is, in how many bytes, and how many may do so at a time.
const GREETING: Duration = Duration::from_secs(2);
const LONGEST_GREETING: usize = 1 << 10;
const GREETINGS: usize = 64;

/// How long rank 0 is waited for, which may fetch the model first.
const BEFORE_RANK_0: Duration = Duration::from_secs(30 * 60);

/// Where ranks meet, and which of them this process is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendezvous {
    /// Host and port at which rank 0 listens.
    pub address: String,
    /// The rank of this process.
    pub rank: usize,
    /// Ranks of the model, one in each process.
    pub ranks: usize,
}

/// A rank in another process, as rank 0 sees it.
pub(super) type Guest = (Link, Started);

/// Listens at the rendezvous until all other ranks have come, and sends each the setting. `members` are those of all ranks.
///
/// # Errors
/// [`Error::BadRequest`] if it cannot listen there; [`Error::Device`] for a rank that does not come.
pub(super) fn gather<D: RankDevice>(at: &Rendezvous, setting: &D::Setting, members: &[Member]) -> Result<Vec<Guest>> {
    let listener = TcpListener::bind(&at.address)
        .and_then(|l| l.set_nonblocking(true).map(|()| l))
        .map_err(|e| unusable(at, &e))?;
    let mut found: Vec<[Option<TcpStream>; 2]> = (1..at.ranks).map(|_| [None, None]).collect();
    let (greeted, heard) = channel();
    let greetings = Arc::new(());
    let began = Instant::now();
    while let Some(missing) = found.iter().position(|ways| ways.iter().any(Option::is_none)) {
        if began.elapsed() > DEADLINE {
            let why = format!("it did not come to {} within {DEADLINE:?}", at.address);
            let fault = Fault::Device { op: format!("rank {}", missing + 1), why };
            for way in found.iter().filter_map(|ways| ways[Way::Commands as usize].as_ref()) {
                let _ = send(way, &Order::End(Some(fault.clone())), &[]);
            }
            return Err(fault.error());
        }
        match listener.accept() {
            // Whoever says nothing, or slowly, keeps nobody waiting.
            Ok((stream, peer)) if Arc::strong_count(&greetings) <= GREETINGS => {
                let (greeted, one) = (greeted.clone(), greetings.clone());
                let hear = move || {
                    let _ = greeted.send((hear(&stream), stream, peer));
                    drop(one);
                };
                // One that is not heard is not kept.
                let _ = thread::Builder::new().name("greeting".into()).spawn(hear);
            }
            Ok(_) => {}
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
        for (hello, stream, peer) in heard.try_iter() {
            if let Err(e) = hello.and_then(|hello| welcome::<D>(&hello, stream, at, setting, &mut found)) {
                tracing::warn!("{peer} is no rank of this model: {e}");
            }
        }
    }
    let ways = found.into_iter().map(|ways| ways.map(|way| way.expect("all have come")));
    ways.zip(&members[1..]).map(|([commands, meeting], member)| guest(commands, meeting, member.clone())).collect()
}

fn unusable(at: &Rendezvous, e: &io::Error) -> Error {
    Error::BadRequest(format!("the rendezvous {}: {e}; it is a host and a port, such as 127.0.0.1:29500", at.address))
}

/// Hears who a connection is from.
fn hear(mut stream: &TcpStream) -> io::Result<Hello> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(SILENCE))?;
    let end = Instant::now() + GREETING;
    let mut bytes = Vec::new();
    loop {
        match Head::of(&bytes) {
            Some(head) if head.head > LONGEST_GREETING as u32 || head.bytes > 0 => {
                return Err(io::Error::other("this is no greeting"));
            }
            Some(head) if bytes.len() >= Head::BYTES + head.head as usize => break,
            _ => {}
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        let mut some = [0; LONGEST_GREETING];
        match stream.read(&mut some)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => bytes.extend_from_slice(&some[..n]),
        }
    }
    rmp_serde::from_slice(&bytes[Head::BYTES..]).map_err(io::Error::other)
}

/// Keeps a connection, or says why not.
fn welcome<D: RankDevice>(
    hello: &Hello,
    stream: TcpStream,
    at: &Rendezvous,
    setting: &D::Setting,
    found: &mut [[Option<TcpStream>; 2]],
) -> io::Result<()> {
    let place = match hello.rank.checked_sub(1).and_then(|i| found.get_mut(i)) {
        _ if hello.program != program() => Err(format!("it is {}, rank 0 is {}", hello.program, program())),
        _ if hello.backend != D::NAME => {
            Err(format!("its backend is {}, that of rank 0 is {}", hello.backend, D::NAME))
        }
        _ if hello.ranks != at.ranks => Err(format!("it is of {} ranks, rank 0 of {}", hello.ranks, at.ranks)),
        None => Err(format!("rank {} of {}", hello.rank, at.ranks)),
        Some(ways) => match &mut ways[hello.way as usize] {
            Some(_) => Err(format!("another process is rank {} already", hello.rank)),
            place => Ok(place),
        },
    };
    match place {
        Ok(place) => {
            send(&stream, &Ok::<_, String>(setting), &[])?;
            *place = Some(stream);
            Ok(())
        }
        Err(why) => {
            send(&stream, &Err::<D::Setting, _>(&why), &[])?;
            Err(io::Error::other(why))
        }
    }
}

/// Starts the threads that stand for a rank of another process.
fn guest(commands: TcpStream, meeting: TcpStream, member: Member) -> Result<Guest> {
    let broken = |e: io::Error| Error::Device { op: format!("rank {}", member.rank()), why: lost(&e) };
    commands.set_read_timeout(Some(SILENCE)).map_err(broken)?;
    meeting.set_read_timeout(None).map_err(broken)?;
    let (told, orders) = channel();
    let (opened, device) = sync_channel(1);
    let done = Arc::new(AtomicU64::new(0));
    let waiting = Arc::new(Mutex::new(VecDeque::new()));
    let ended = Arc::new(AtomicBool::new(false));
    let to = commands.try_clone().map_err(broken)?;
    let named = |what: &str| format!("rank {} {what}", member.rank());
    let told_last = meeting.try_clone().map_err(broken)?;
    let (of, end) = (member.clone(), ended.clone());
    let standing = start(named("meeting"), move || {
        let Err(e) = stand_in(&meeting, &of);
        if !end.load(Ordering::Relaxed) {
            of.fail(lost(&e));
        }
    })?;
    let (of, all, end) = (member.clone(), waiting.clone(), ended.clone());
    let orders = start(named("orders"), move || {
        if let Err(e) = pass_on(&to, &orders, &all, &of) {
            of.fail(lost(&e));
        }
        end.store(true, Ordering::Relaxed);
        let _ = send(&to, &Order::End(of.check().err().map(Fault::from)), &[]);
        let _ = to.shutdown(Shutdown::Write);
    })?;
    let (of, count) = (member.clone(), done.clone());
    let answers = start(named("answers"), move || {
        let Err(e) = take_answers(&commands, &opened, &waiting, &count);
        // A rank says why it fails before its process ends.
        let _ = told_last.shutdown(Shutdown::Read);
        let _ = standing.join();
        if !ended.load(Ordering::Relaxed) {
            of.fail(lost(&e));
        }
        // Whoever waits for an answer learns that none comes.
        lock(&waiting).clear();
    })?;
    Ok((Link { commands: told, done }, Started { threads: vec![orders, answers], opened: device }))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sends what a rank is told, until nobody tells it anything or a rank has failed.
fn pass_on(
    to: &TcpStream,
    told: &Receiver<Told>,
    waiting: &Mutex<VecDeque<SyncSender<Answer>>>,
    member: &Member,
) -> io::Result<()> {
    while member.check().is_ok() {
        match told.recv_timeout(LOOK) {
            Ok(Told { command, to: asker }) => {
                let bytes = match &command {
                    Command::Write { bytes, .. } => bytes.clone(),
                    _ => Default::default(),
                };
                let order = match asker {
                    None => Order::Do(command),
                    Some(asker) => {
                        lock(waiting).push_back(asker);
                        Order::Ask(command)
                    }
                };
                send(to, &order, &bytes)?;
            }
            Err(RecvTimeoutError::Timeout) => send(to, &Order::Alive, &[])?,
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    Ok(())
}

/// Hands the answers of a rank to those that wait for them. `done` follows the rank's count.
fn take_answers(
    from: &TcpStream,
    opened: &SyncSender<Result<Opened>>,
    waiting: &Mutex<VecDeque<SyncSender<Answer>>>,
    done: &AtomicU64,
) -> io::Result<Infallible> {
    loop {
        let ((count, reply), bytes) = receive::<(u64, Reply)>(from)?;
        done.store(count, Ordering::Relaxed);
        let result = |fault: Option<Fault>| fault.map_or(Ok(()), |fault| Err(fault.error()));
        let answer = match reply {
            Reply::Alive => continue,
            Reply::Opened(device) => {
                let _ = opened.send(Ok(Opened { device, caps: None }));
                continue;
            }
            Reply::Failed(fault) => {
                let _ = opened.send(Err(fault.error()));
                continue;
            }
            Reply::Done => Answer::Done,
            Reply::Alloc(fault) => Answer::Alloc(result(fault)),
            Reply::Filled(filled) => Answer::Filled(filled),
            Reply::FreeMemory(free) => Answer::FreeMemory(free),
            Reply::Bytes(bytes) => Answer::Bytes(bytes),
            Reply::Read(fault) => Answer::Read(Box::new(Some(result(fault).map(|()| bytes)))),
        };
        if let Some(asker) = lock(waiting).pop_front() {
            // Whoever asked may have given up.
            let _ = asker.send(answer);
        }
    }
}

/// Is a rank of another process in the group, until that ends.
fn stand_in(with: &TcpStream, member: &Member) -> io::Result<Infallible> {
    loop {
        let (say, bytes) = receive::<Say>(with)?;
        let answer = match say {
            Say::Tell(key) => {
                member.tell(key, bytes);
                continue;
            }
            Say::Fail(why) => {
                member.fail(why);
                continue;
            }
            Say::Learn(key) => member.learn(&key).map(|value| (vec![value.len()], value)),
            Say::Exchange => {
                let (mut lengths, mut all) = (Vec::new(), Vec::new());
                let met = member.exchange(
                    |own| own.extend(floats(&bytes)),
                    |_, values| {
                        lengths.push(size_of_val(values));
                        all.extend_from_slice(bytemuck::cast_slice(values));
                    },
                );
                met.map(|()| (lengths, all))
            }
        };
        match answer {
            Ok((lengths, bytes)) => send(with, &Ok::<_, Fault>(lengths), &bytes)?,
            Err(e) => send(with, &Err::<Vec<usize>, _>(Fault::from(e)), &[])?,
        }
    }
}

/// Processes of one host have bytes in the same order.
fn floats(bytes: &[u8]) -> Vec<f32> {
    bytemuck::pod_collect_to_vec(bytes)
}

/// The way from a rank's process to its group.
struct There {
    to: TcpStream,
    /// Held from a question to its answer.
    from: Mutex<TcpStream>,
    failed: Mutex<Option<Fault>>,
}

impl There {
    fn say(&self, say: &Say, bytes: &[u8]) -> Result<()> {
        send(&self.to, say, bytes).map_err(|e| self.broken(&e))
    }

    /// What the group answers: the bytes of several values, one after the other, and their lengths.
    fn ask(&self, say: &Say, bytes: &[u8]) -> Result<(Vec<usize>, Vec<u8>)> {
        self.check()?;
        let from = lock(&self.from);
        self.say(say, bytes)?;
        let (answer, bytes) = receive::<std::result::Result<Vec<usize>, Fault>>(&from).map_err(|e| self.broken(&e))?;
        match answer {
            Ok(lengths) if lengths.iter().sum::<usize>() == bytes.len() => Ok((lengths, bytes)),
            Ok(_) => Err(self.broken(&io::Error::other("an answer of another length"))),
            Err(fault) => Err(self.note(fault)),
        }
    }

    fn broken(&self, e: &io::Error) -> Error {
        self.note(Fault::Device { op: "rank 0".into(), why: lost(e) })
    }

    /// Keeps the first fault, which it returns.
    fn note(&self, fault: Fault) -> Error {
        lock(&self.failed).get_or_insert(fault).clone().error()
    }
}

impl Group for There {
    fn exchange(
        &self,
        _: usize,
        fill: &mut dyn FnMut(&mut Vec<f32>),
        read: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        let mut own = Vec::new();
        fill(&mut own);
        let (lengths, all) = self.ask(&Say::Exchange, bytemuck::cast_slice(&own))?;
        let mut rest = &all[..];
        for (rank, length) in lengths.into_iter().enumerate() {
            let (values, after) = rest.split_at(length);
            read(rank, &floats(values));
            rest = after;
        }
        Ok(())
    }

    fn fail(&self, rank: usize, why: String) {
        // Said first, since the process ends once it is noted. If it does not arrive, the connection's end tells the others.
        let _ = send(&self.to, &Say::Fail(why.clone()), &[]);
        self.note(Fault::Device { op: format!("rank {rank}"), why });
    }

    fn check(&self) -> Result<()> {
        lock(&self.failed).clone().map_or(Ok(()), |fault| Err(fault.error()))
    }

    fn tell(&self, _: usize, key: String, value: Vec<u8>) {
        // An error is kept, and comes with the next question.
        let _ = self.say(&Say::Tell(key), &value);
    }

    fn learn(&self, _: usize, key: &str) -> Result<Vec<u8>> {
        Ok(self.ask(&Say::Learn(key.into()), &[])?.1)
    }
}

/// Connects to rank 0, which may not listen yet, and says who this is; the setting of all ranks.
fn greet<D: RankDevice>(at: &Rendezvous, way: Way) -> Result<(TcpStream, D::Setting)> {
    let named = |why: String| Error::Device { op: format!("rank 0 at {}", at.address), why };
    let places: Vec<_> = at.address.to_socket_addrs().map_err(|e| unusable(at, &e))?.collect();
    let began = Instant::now();
    let stream = loop {
        match TcpStream::connect(&places[..]) {
            Ok(stream) => break stream,
            Err(_) if began.elapsed() < BEFORE_RANK_0 => thread::sleep(Duration::from_millis(50)),
            Err(e) => return Err(named(format!("it was not there within {BEFORE_RANK_0:?}: {e}"))),
        }
    };
    let Rendezvous { rank, ranks, .. } = *at;
    let hello = Hello { program: program(), backend: D::NAME.into(), rank, ranks, way };
    let answer = || -> io::Result<std::result::Result<D::Setting, String>> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(DEADLINE))?;
        stream.set_write_timeout(Some(SILENCE))?;
        send(&stream, &hello, &[])?;
        Ok(receive(&stream)?.0)
    };
    match answer() {
        Ok(Ok(setting)) => Ok((stream, setting)),
        Ok(Err(why)) => Err(Error::BadRequest(format!("rank 0 does not take rank {rank}: {why}"))),
        Err(e) => Err(named(lost(&e))),
    }
}

/// Is a rank other than 0: opens device number `device` and does what rank 0 says, until that ends.
///
/// # Errors
/// [`Error::BadRequest`] for a rank that there is not; those of the device; [`Error::Device`] with the reason of the rank that failed
/// first, or if rank 0's process is gone.
pub fn follow<D: RankDevice>(at: &Rendezvous, device: usize) -> Result<()> {
    check_number(at.ranks)?;
    if !(1..at.ranks).contains(&at.rank) {
        return Err(Error::BadRequest(format!("rank {} of {} ranks", at.rank, at.ranks)));
    }
    let (commands, setting) = greet::<D>(at, Way::Commands)?;
    let (meeting, _) = greet::<D>(at, Way::Meeting)?;
    let broken = |e: io::Error| Error::Device { op: "rank 0".into(), why: lost(&e) };
    // Rank 0 says nothing before all have come. Those who meet are waited for until the deadline, so the answer may take longer.
    meeting.set_read_timeout(Some(2 * DEADLINE + SILENCE)).map_err(broken)?;
    commands.set_read_timeout(Some(DEADLINE + SILENCE)).map_err(broken)?;
    let group = There { to: meeting.try_clone().map_err(broken)?, from: Mutex::new(meeting), failed: Mutex::default() };
    let member = Member::of(at.rank, at.ranks, Arc::new(group));
    let (link, Started { threads, opened }) = spawn::<D>(member.clone(), setting, device)?;
    let (questions, asked) = channel();
    let (to, done) = (commands.try_clone().map_err(broken)?, link.done.clone());
    let writer = start("answers".into(), move || answer(&to, &opened, &asked, &done))?;
    let mut worked = false;
    loop {
        let (order, bytes) = receive::<Order>(&commands).map_err(|e| {
            let e = member.check().err().unwrap_or(broken(e));
            // The device may wait for a rank that is gone.
            member.fail(e.to_string());
            e
        })?;
        commands.set_read_timeout(Some(SILENCE)).map_err(broken)?;
        // What it says last is said before it ends.
        member.check()?;
        let (mut command, to) = match order {
            Order::Alive => continue,
            Order::End(None) if worked => break,
            Order::End(None) => {
                let why = "it ended before the first step, and says why".to_owned();
                return Err(Error::Device { op: "rank 0".into(), why });
            }
            Order::End(Some(fault)) => {
                let e = fault.error();
                member.fail(e.to_string());
                return Err(e);
            }
            Order::Do(command) => (command, None),
            Order::Ask(command) => {
                let (to, answer) = sync_channel(1);
                let _ = questions.send(answer);
                (command, Some(to))
            }
        };
        match &mut command {
            Command::Write { bytes: place, .. } => *place = bytes.into(),
            Command::Run(_) | Command::Play(_) => worked = true,
            _ => {}
        }
        if link.commands.send(Told { command, to }).is_err() {
            // It has failed, and says why.
            let _ = threads.into_iter().try_for_each(JoinHandle::join);
            return member.check();
        }
    }
    drop((link, questions));
    for thread in threads.into_iter().chain([writer]) {
        let _ = thread.join();
    }
    member.check()
}

/// Sends what a rank's device is, then the answers to `asked` in order, and in between that it is there.
fn answer(to: &TcpStream, opened: &Receiver<Result<Opened>>, asked: &Receiver<Receiver<Answer>>, done: &AtomicU64) {
    let reply = |reply: Reply, bytes: &[u8]| send(to, &(done.load(Ordering::Relaxed), reply), bytes);
    let all = || -> io::Result<()> {
        match patiently(opened, || reply(Reply::Alive, &[]))? {
            Some(Ok(opened)) => reply(Reply::Opened(opened.device), &[])?,
            Some(Err(e)) => return reply(Reply::Failed(e.into()), &[]),
            None => return Ok(()),
        }
        while let Some(question) = patiently(asked, || reply(Reply::Alive, &[]))? {
            let Some(answer) = patiently(&question, || reply(Reply::Alive, &[]))? else { return Ok(()) };
            match answer {
                Answer::Done => reply(Reply::Done, &[])?,
                Answer::Alloc(result) => reply(Reply::Alloc(result.err().map(Fault::from)), &[])?,
                Answer::Filled(filled) => reply(Reply::Filled(filled), &[])?,
                Answer::FreeMemory(free) => reply(Reply::FreeMemory(free), &[])?,
                Answer::Bytes(bytes) => reply(Reply::Bytes(bytes), &[])?,
                Answer::Read(mut arriving) => match arrived(&mut *arriving, || reply(Reply::Alive, &[]))? {
                    Ok(bytes) => reply(Reply::Read(None), &bytes)?,
                    Err(e) => reply(Reply::Read(Some(e.into())), &[])?,
                },
            }
        }
        Ok(())
    };
    // A connection that is broken is noticed by whoever reads from it.
    let _ = all();
}

/// The next value, or `None` if none comes any more; `alive` is called while it is waited for.
fn patiently<T>(from: &Receiver<T>, alive: impl Fn() -> io::Result<()>) -> io::Result<Option<T>> {
    loop {
        match from.recv_timeout(LOOK) {
            Ok(value) => return Ok(Some(value)),
            Err(RecvTimeoutError::Timeout) => alive()?,
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
        }
    }
}

/// The bytes of a read, which is waited for as the engine waits: without sleeping.
fn arrived(arriving: &mut dyn Arriving, alive: impl Fn() -> io::Result<()>) -> io::Result<Result<Vec<u8>>> {
    let mut said = Instant::now();
    loop {
        for _ in 0..1 << 12 {
            if let Some(bytes) = arriving.take() {
                return Ok(bytes);
            }
            std::hint::spin_loop();
        }
        if said.elapsed() > LOOK {
            alive()?;
            said = Instant::now();
        }
    }
}

#[cfg(test)]
#[path = "process_tests.rs"]
mod tests;
