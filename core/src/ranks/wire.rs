//! What goes over the connections between processes that are ranks: messages of a head, in MessagePack, and bytes that belong to it.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::rank::Command;
use crate::error::Error;

/// Bytes of the largest head of a message: the ops of a step.
const LONGEST_HEAD: u32 = 256 << 20;

/// The first message of a connection.
#[derive(Serialize, Deserialize)]
pub(super) struct Hello {
    pub program: String,
    pub backend: String,
    pub rank: usize,
    pub ranks: usize,
    pub way: Way,
}

/// What a connection is for.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(super) enum Way {
    Commands,
    Meeting,
}

/// From rank 0 to a rank.
#[derive(Serialize, Deserialize)]
pub(super) enum Order {
    Alive,
    Do(Command),
    Ask(Command),
    /// Nothing comes after it: rank 0 needs the rank no more, or why it cannot use it.
    End(Option<Fault>),
}

/// From a rank to rank 0. The first one is its device or why there is none; then the answers in the order of the questions.
#[derive(Serialize, Deserialize)]
pub(super) enum Reply {
    Alive,
    Opened(String),
    Failed(Fault),
    Done,
    Alloc(Option<Fault>),
    Filled(bool),
    FreeMemory(Option<u64>),
    Bytes(u64),
    Read(Option<Fault>),
}

/// From a rank to its group.
#[derive(Serialize, Deserialize)]
pub(super) enum Say {
    Exchange,
    Tell(String),
    Learn(String),
    Fail(String),
}

/// An error on its way.
#[derive(Clone, Serialize, Deserialize)]
pub(super) enum Fault {
    OutOfMemory { what: String, asked: u64, free: u64 },
    Device { op: String, why: String },
    Other(String),
}

impl From<Error> for Fault {
    fn from(e: Error) -> Self {
        match e {
            Error::OutOfMemory { what, asked, free } => Self::OutOfMemory { what, asked, free },
            Error::Device { op, why } => Self::Device { op, why },
            e => Self::Other(e.to_string()),
        }
    }
}

impl Fault {
    pub fn error(self) -> Error {
        match self {
            Self::OutOfMemory { what, asked, free } => Error::OutOfMemory { what, asked, free },
            Self::Device { op, why } => Error::Device { op, why },
            Self::Other(why) => Error::BadRequest(why),
        }
    }
}

/// Which program speaks: another one may have other ops.
pub(super) fn program() -> String {
    format!("selkie {}", env!("CARGO_PKG_VERSION"))
}

/// How long the parts of a message are: its head, and the bytes that belong to it.
pub(super) struct Head {
    pub head: u32,
    pub bytes: u64,
}

impl Head {
    pub const BYTES: usize = 12;

    /// What a message begins with; `None` before it is there.
    pub fn of(message: &[u8]) -> Option<Self> {
        let (head, rest) = message.split_first_chunk()?;
        Some(Self { head: u32::from_le_bytes(*head), bytes: u64::from_le_bytes(*rest.first_chunk()?) })
    }
}

/// Sends a head and the bytes that belong to it.
pub(super) fn send(mut to: &TcpStream, head: &impl Serialize, bytes: &[u8]) -> io::Result<()> {
    let head = rmp_serde::to_vec(head).map_err(io::Error::other)?;
    let length = u32::try_from(head.len()).ok().filter(|n| *n <= LONGEST_HEAD);
    let length = length.ok_or_else(|| io::Error::other(format!("a message with a head of {} bytes", head.len())))?;
    let mut first = [&length.to_le_bytes()[..], &(bytes.len() as u64).to_le_bytes(), &head].concat();
    // One packet if it is small.
    if bytes.len() <= 1 << 16 {
        first.extend_from_slice(bytes);
        return to.write_all(&first);
    }
    to.write_all(&first)?;
    to.write_all(bytes)
}

/// The next head with its bytes. Memory is taken as they come, whatever was announced.
pub(super) fn receive<T: DeserializeOwned>(mut from: &TcpStream) -> io::Result<(T, Vec<u8>)> {
    let mut lengths = [0; Head::BYTES];
    from.read_exact(&mut lengths)?;
    let lengths = Head::of(&lengths).expect("it is complete");
    if lengths.head > LONGEST_HEAD {
        return Err(io::Error::other(format!("a message with a head of {} bytes", lengths.head)));
    }
    let part = |length: u64| {
        let mut bytes = Vec::new();
        match from.take(length).read_to_end(&mut bytes)? as u64 == length {
            true => Ok(bytes),
            false => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
        }
    };
    let head = part(u64::from(lengths.head))?;
    let bytes = part(lengths.bytes)?;
    Ok((rmp_serde::from_slice(&head).map_err(io::Error::other)?, bytes))
}

/// Why a connection ended.
pub(super) fn lost(e: &io::Error) -> String {
    match e.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "its process said nothing for too long".into(),
        io::ErrorKind::Other => format!("its process is not understood: {e}"),
        _ => format!("its process ended or its connection broke: {e}"),
    }
}
