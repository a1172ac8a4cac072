//! Shows prefix reuse: a second question in the same conversation does not compute the first part of its prompt again.
//!
//! `cargo run --release --example prefix_reuse`

use selkie::{Ask, Device, Message, Prompt};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = selkie::demo()?.device(Device::Cpu).load()?;
    let mut messages = vec![];
    let mut reused = 0;
    for question in ["Tell me a story about a fox named Leo and a lantern.", "What is 17 + 25?", "What is 8 + 9?"] {
        messages.push(Message::new("user", question));
        let prompt = Prompt::Messages(messages.clone());
        let completion = model.submit(Ask { prompt, ..Ask::default() })?.finish();
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
