//! The load generator: requests over HTTP, or straight through the front door, and when their tokens arrived.

use std::{net::SocketAddr, time::Instant};

use selkie_core::session::{Ask, Model, Overrides, Prompt, Update};
use serde::Deserialize;
use serde_json::Value;
use tokio::net::TcpStream;

/// What came of a request.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// The tokens.
    pub ids: Vec<u32>,
    /// When each piece with tokens came; of an answer that is not streamed, its end.
    pub at: Vec<Instant>,
}

impl Told {
    fn take(&mut self, ids: impl IntoIterator<Item = u32>) {
        let before = self.ids.len();
        self.ids.extend(ids);
        if self.ids.len() > before {
            self.at.push(Instant::now());
        }
    }
}

/// Sends a prompt through the front door, and reads the answer of `tokens` tokens.
pub async fn direct(model: &Model, prompt: &[u32], tokens: usize) -> Result<Told, String> {
    let ask = Ask {
        prompt: Prompt::Ids(prompt.to_vec()),
        sampling: Overrides { temperature: Some(0.0), ..Overrides::default() },
        max_tokens: Some(tokens),
        ignore_eos: true,
        ..Ask::default()
    };
    let mut answer = model.submit(ask).map_err(|e| e.to_string())?;
    let mut told = Told::default();
    while let Some(update) = answer.next().await {
        match update {
            Update::Text { tokens, .. } => told.take(tokens.iter().map(|token| token.id)),
            Update::Done(done) => done.error().map_or(Ok(()), |e| Err(e.to_string()))?,
        }
    }
    Ok(told)
}

/// A part of an answer, or all of it: what the generator needs.
#[derive(Deserialize)]
struct Piece {
    #[serde(default)]
    choices: Vec<Choice>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    token_ids: Vec<u32>,
}

/// A connection that is kept, with one request at a time.
pub struct Connection {
    stream: TcpStream,
    /// What was received and not read.
    buffer: Vec<u8>,
}

impl Connection {
    /// Connects to a server.
    pub async fn open(address: SocketAddr) -> Result<Self, String> {
        let stream = TcpStream::connect(address).await.map_err(|e| format!("connecting to the server: {e}"))?;
        let _ = stream.set_nodelay(true);
        Ok(Self { stream, buffer: Vec::new() })
    }

    /// Sends a request, and reads its answer.
    pub async fn ask(&mut self, request: &[u8]) -> Result<Told, String> {
        self.send(request).await?;
        let end = self.find(b"\r\n\r\n").await?;
        let head = String::from_utf8_lossy(&self.take(end + 4)).to_ascii_lowercase();
        let mut told = Told::default();
        if head.contains("\r\ntransfer-encoding: chunked\r\n") {
            self.events(&mut told).await?;
            return Ok(told);
        }
        let length = head.split("\r\ncontent-length: ").nth(1).and_then(|rest| rest.split("\r\n").next()?.parse().ok());
        let length = length.ok_or_else(|| format!("an answer without a length: {head}"))?;
        self.fill(length).await?;
        let body = self.take(length);
        read(&body, &mut told)?;
        match head.starts_with("http/1.1 200 ") {
            true => Ok(told),
            false => Err(String::from_utf8_lossy(&body).into_owned()),
        }
    }

    /// Reads chunks of events up to the last one.
    async fn events(&mut self, told: &mut Told) -> Result<(), String> {
        let mut events = Vec::new();
        loop {
            let end = self.find(b"\r\n").await?;
            let line = self.take(end + 2);
            let size = std::str::from_utf8(&line[..end]).ok().and_then(|line| usize::from_str_radix(line, 16).ok());
            let size = size.ok_or("a chunk without a size")?;
            self.fill(size + 2).await?;
            events.extend_from_slice(&self.take(size + 2)[..size]);
            if size == 0 {
                return Ok(());
            }
            while let Some(end) = place(&events, b"\n\n") {
                match events[..end].strip_prefix(b"data: ") {
                    None | Some(b"[DONE]") => {}
                    Some(data) => read(data, told)?,
                }
                events.drain(..end + 2);
            }
        }
    }

    async fn send(&mut self, mut bytes: &[u8]) -> Result<(), String> {
        while !bytes.is_empty() {
            self.stream.writable().await.map_err(broken)?;
            match self.stream.try_write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(broken(e)),
            }
        }
        Ok(())
    }

    /// Receives until the buffer has so many bytes.
    async fn fill(&mut self, bytes: usize) -> Result<(), String> {
        while self.buffer.len() < bytes {
            self.stream.readable().await.map_err(broken)?;
            let mut some = [0; 16 << 10];
            match self.stream.try_read(&mut some) {
                Ok(0) => return Err("the server closed a connection within an answer".into()),
                Ok(n) => self.buffer.extend_from_slice(&some[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(broken(e)),
            }
        }
        Ok(())
    }

    /// Receives until the buffer has these bytes; where.
    async fn find(&mut self, bytes: &[u8]) -> Result<usize, String> {
        loop {
            if let Some(at) = place(&self.buffer, bytes) {
                return Ok(at);
            }
            self.fill(self.buffer.len() + 1).await?;
        }
    }

    fn take(&mut self, bytes: usize) -> Vec<u8> {
        let rest = self.buffer.split_off(bytes);
        std::mem::replace(&mut self.buffer, rest)
    }
}

fn read(json: &[u8], told: &mut Told) -> Result<(), String> {
    let piece: Piece = serde_json::from_slice(json).map_err(|e| format!("an answer that is no JSON: {e}"))?;
    match piece.error {
        Some(e) => Err(e["message"].as_str().map_or_else(|| e.to_string(), str::to_owned)),
        None => {
            told.take(piece.choices.into_iter().flat_map(|choice| choice.token_ids));
            Ok(())
        }
    }
}

fn place(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

fn broken(e: std::io::Error) -> String {
    format!("a connection to the server: {e}")
}
