//! Shows prefix reuse: a second question in the same conversation does not compute the first part of its prompt again.
//!
//! `cargo run --release --example prefix_reuse`

use std::rc::Rc;

use selkie_core::chat::Message;
use selkie_core::cpu::CpuBackend;
use selkie_core::engine::EngineOptions;
use selkie_core::model_dir::ModelFiles;
use selkie_core::session::{Ask, Completion, Prompt, Session, Update};
use selkie_core::source::Dir;

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo");

fn main() -> Result<(), Box<dyn std::error::Error>> {
    Ok(pollster::block_on(run())?)
}

async fn run() -> selkie_core::Result<()> {
    let files = Rc::new(ModelFiles::open(Rc::new(Dir::open(DEMO)?), || 0).await?);
    let mut session = Session::load(CpuBackend::new(), files, &EngineOptions::default(), &mut |_| {}).await?;
    let mut messages = vec![];
    let mut reused = 0;
    for question in ["Tell me a story about a fox named Leo and a lantern.", "What is 17 + 25?", "What is 8 + 9?"] {
        messages.push(Message::new("user", question));
        let completion = ask(&mut session, messages.clone()).await?;
        if let Some(cache) = completion.end.cache {
            reused = cache.reused;
            let tokens = completion.end.prompt_tokens;
            println!("{question}\n  reused {reused} of {tokens} prompt tokens ({:?})", cache.reason);
        }
        messages.push(Message::new("assistant", completion.text.as_deref().unwrap_or_default()));
    }
    // The conversation is longer than one page of 64 tokens by now, so part of it must have been reused.
    assert!(reused > 0, "nothing was reused");
    Ok(())
}

/// Runs one request to its end.
async fn ask(session: &mut Session<CpuBackend>, messages: Vec<Message>) -> selkie_core::Result<Completion> {
    session.submit(Ask { prompt: Prompt::Messages(messages), ..Ask::default() })?;
    loop {
        for update in session.step().await? {
            if let Update::Done { completion, .. } = update {
                return Ok(completion);
            }
        }
    }
}
