//! Copies the shaders without comments and indentation, a quarter of their text: a browser downloads them with the engine.

use std::path::Path;
use std::{env, error, fs};

fn main() -> Result<(), Box<dyn error::Error>> {
    let out = env::var("OUT_DIR")?;
    // Cargo runs this again when the crate of the shaders changes; no file here matters.
    println!("cargo::rerun-if-changed=build.rs");
    for (name, text) in selkie_shaders::FILES {
        // WGSL has no strings that could hold slashes.
        let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default().trim());
        let lines: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
        fs::write(Path::new(&out).join(name), lines.join("\n") + "\n")?;
    }
    Ok(())
}
