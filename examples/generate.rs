//! Answers one question with the engine polled on this thread, without the library's front door (`ask.rs` has that).
//!
//! `cargo run --release --example generate [MODEL_DIR [QUESTION]]`; without arguments the demo model adds two numbers.

use std::io::{Write, stdout};
use std::sync::Arc;

use selkie_core::chat::Message;
use selkie_core::cpu::CpuBackend;
use selkie_core::engine::EngineOptions;
use selkie_core::model_dir::ModelFiles;
use selkie_core::session::{Ask, Local, Prompt, Update};
use selkie_core::source::Dir;

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo");

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let model = args.next().unwrap_or_else(|| DEMO.to_owned());
    let question = args.next().unwrap_or_else(|| "What is 17 + 25?".to_owned());
    Ok(pollster::block_on(answer(&model, &question))?)
}

async fn answer(model: &str, question: &str) -> selkie_core::Result<()> {
    // The second argument is the clock for chat templates that print the date; here it stands still.
    let files = ModelFiles::open(Arc::new(Dir::open(model)?), || 0).await?;
    let mut session = Local::load(CpuBackend::new(), &files, &EngineOptions::default(), &mut |_| {}).await?;
    let messages = vec![Message::new("user", question)];
    session.submit(Ask { prompt: Prompt::Messages(messages), ..Ask::default() })?;
    while !session.is_idle() {
        for (_, update) in session.step().await? {
            match update {
                Update::Text { text, .. } => {
                    print!("{text}");
                    // A closed pipe is no reason to stop.
                    stdout().flush().ok();
                }
                Update::Done(completion) => println!("\n({} tokens)", completion.ids.len()),
            }
        }
    }
    Ok(())
}
