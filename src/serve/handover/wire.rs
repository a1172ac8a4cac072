//! What goes over the connection of a hand-over. Numbers are little endian; every wait has a deadline.
//!
//! 1. The one who answers: [`MAGIC`], and the number of the room (u64).
//! 2. The one who computes: [`OFFER`], a length (u32) and an [`Offer`](super::Offer) as JSON, a count (u32) and the prompt's tokens
//!    (u32 each). If the prompt is another one, or nothing of it is needed, the connection is closed.
//! 3. The one who answers: for how many tokens it has the pages (u32).
//! 4. The one who computes: bundles (docs/bundle.md), each without the pages before it, as soon as steps have filled its own.
//!    Before each, [`PAGES`], or [`LAST`] if nothing will follow, and a length (u64). [`WAIT`] comes every second in which there is
//!    nothing else.
//!
//! [`NOTHING`], a length (u16) and the reason may come in place of an offer or of a bundle.

use std::{io, time::Duration};

use selkie_core::zeroed::Zeroed;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

/// The first bytes of a connection.
const MAGIC: &[u8; 8] = b"selkieH3";
/// Nothing is ready yet.
pub const WAIT: u8 = 0;
/// An offer follows.
pub const OFFER: u8 = 1;
/// A bundle follows, and later another one.
pub const PAGES: u8 = 2;
/// There is nothing to hand over; the reason follows.
pub const NOTHING: u8 = 3;
/// The last bundle follows.
pub const LAST: u8 = 4;
/// How long the other side may do nothing.
pub const STALL: Duration = Duration::from_secs(10);
/// How often a [`WAIT`] is sent.
pub const SIGN_OF_LIFE: Duration = Duration::from_secs(1);
/// Most bytes of an offer.
const MOST_OFFER: u32 = 64 << 10;

/// A connection whose waits have deadlines.
pub struct Line(TcpStream);

impl Line {
    /// On a new connection.
    pub fn new(stream: TcpStream) -> Self {
        // Pieces are large; small ones are waited for.
        let _ = stream.set_nodelay(true);
        Self(stream)
    }

    /// Fills `bytes`.
    pub async fn read(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        timed(self.0.read_exact(bytes)).await.map(|_| ())
    }

    /// Sends `bytes`.
    pub async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        timed(self.0.write_all(bytes)).await
    }

    /// Asks for a room.
    pub async fn hello(&mut self, room: u64) -> io::Result<()> {
        self.write(&[&MAGIC[..], &room.to_le_bytes()].concat()).await
    }

    /// The room that is asked for.
    pub async fn asked(&mut self) -> io::Result<u64> {
        let mut bytes = [0; 16];
        self.read(&mut bytes).await?;
        let (magic, room) = bytes.split_at(8);
        match (magic == MAGIC, room.try_into()) {
            (true, Ok(room)) => Ok(u64::from_le_bytes(room)),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "this is no hand-over")),
        }
    }

    /// A number of 8, 16, 32 or 64 bits.
    pub async fn number(&mut self, bytes: usize) -> io::Result<u64> {
        let mut all = [0; 8];
        self.read(&mut all[..bytes]).await?;
        Ok(u64::from_le_bytes(all))
    }

    /// Offers the state of a prompt.
    pub async fn offer(&mut self, json: &[u8], tokens: &[u32]) -> io::Result<()> {
        let words = tokens.iter().flat_map(|token| token.to_le_bytes());
        let mut all = vec![OFFER];
        all.extend((json.len() as u32).to_le_bytes());
        all.extend(json);
        all.extend((tokens.len() as u32).to_le_bytes());
        all.extend(words);
        self.write(&all).await
    }

    /// What is offered, after its mark: JSON, and `count` tokens; `None` if there are more or fewer.
    pub async fn offered(&mut self, count: usize) -> io::Result<(Vec<u8>, Option<Vec<u32>>)> {
        let length = self.number(4).await? as u32;
        if length > MOST_OFFER {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the offer is too long"));
        }
        let mut json = vec![0; length as usize];
        self.read(&mut json).await?;
        if self.number(4).await? != count as u64 {
            return Ok((json, None));
        }
        let mut words = vec![0; 4 * count];
        self.read(&mut words).await?;
        let tokens = words.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        Ok((json, Some(tokens)))
    }

    /// The length of a bundle of at most `most` bytes.
    pub async fn length(&mut self, most: u64) -> io::Result<u64> {
        let length = self.number(8).await?;
        if length > most {
            let why = format!("it sends {length} bytes, of which --max-state allows {most}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        Ok(length)
    }

    /// A bundle of this length.
    pub async fn bundle(&mut self, length: u64) -> io::Result<Zeroed> {
        let bytes = usize::try_from(length).ok().and_then(Zeroed::new);
        let mut bundle = bytes.ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let mut rest = &mut bundle[..];
        while !rest.is_empty() {
            let read = timed(self.0.read(rest)).await?;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            rest = &mut rest[read..];
        }
        Ok(bundle)
    }

    /// Says why there is nothing.
    pub async fn nothing(&mut self, why: &str) -> io::Result<()> {
        let why = &why.as_bytes()[..why.len().min(usize::from(u16::MAX))];
        self.write(&[&[NOTHING], &(why.len() as u16).to_le_bytes()[..], why].concat()).await
    }

    /// The reason, after its mark.
    pub async fn reason(&mut self) -> io::Result<String> {
        let length = self.number(2).await?;
        let mut text = vec![0; length as usize];
        self.read(&mut text).await?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// Until the other side leaves, or says something when it is not its turn.
    pub async fn left(&mut self) {
        let _ = self.0.read(&mut [0]).await;
    }
}

async fn timed<T>(work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(STALL, work).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// What became of the other side.
pub fn fate(e: &io::Error) -> String {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, TimedOut, UnexpectedEof};
    match e.kind() {
        TimedOut => format!("it did nothing for {} s", STALL.as_secs()),
        UnexpectedEof | BrokenPipe | ConnectionReset => "it has closed the connection".into(),
        _ => e.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use tokio::{net::TcpListener, runtime};

    use super::*;

    /// The bundle that comes out of a connection into which these bytes go.
    fn bundle(bytes: Vec<u8>, most: u64) -> io::Result<Zeroed> {
        runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            let mut to = TcpStream::connect(listener.local_addr()?).await?;
            let mut line = Line::new(listener.accept().await?.0);
            tokio::spawn(async move { to.write_all(&bytes).await });
            let length = line.length(most).await?;
            line.bundle(length).await
        })
    }

    #[test]
    fn a_bundle_has_a_length_and_a_limit() {
        assert_eq!(bundle(b"\x03\0\0\0\0\0\0\0abcd".to_vec(), 3).unwrap()[..], b"abc"[..]);
        assert!(bundle(vec![0; 8], 0).unwrap().is_empty());
        for (bytes, kind) in [
            (&b"\x03\0\0\0\0\0\0\0ab"[..], io::ErrorKind::UnexpectedEof),
            (b"\x03\0\0", io::ErrorKind::UnexpectedEof),
            (b"\x04\0\0\0\0\0\0\0abcd", io::ErrorKind::InvalidData),
            (b"\xff\xff\xff\xff\xff\xff\xff\xffabcd", io::ErrorKind::InvalidData),
        ] {
            assert_eq!(bundle(bytes.to_vec(), 3).err().unwrap().kind(), kind, "{bytes:?}");
        }
    }
}
