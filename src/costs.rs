//! What more tokens of a step cost a model on a device: measured once, and kept for later starts.

use std::path::PathBuf;

use selkie_core::{
    Result,
    backend::{Backend, Caps},
    bundle::numerics,
    cache_dir,
    cpu::par,
    engine::{Engine, EngineOptions, Speculate},
    model_dir::ModelFiles,
    state::TokenCosts,
};

/// Gives a new engine the costs that an earlier start measured, or measures them if the options ask for that.
///
/// # Errors
/// Those of [`Engine::measure_costs`], and of the model's files.
pub fn learn<B: Backend>(engine: &mut Engine<B>, files: &ModelFiles, options: &EngineOptions) -> Result<()> {
    if options.speculate != Speculate::Auto {
        return Ok(());
    }
    let fingerprint = pollster::block_on(files.fingerprint())?;
    let file = file(engine.caps(), fingerprint, options.engines);
    let stored = file.as_ref().and_then(|file| std::fs::read_to_string(file).ok());
    let stored = stored.as_deref().and_then(parse);
    let costs = match stored {
        None if options.measure_costs => pollster::block_on(engine.measure_costs())?,
        stored => stored,
    };
    let Some(costs) = costs else { return Ok(()) };
    tracing::info!("steps of 1, 2, 4 and 8 tokens take {:.2?} times as long as one of 1", costs.times());
    engine.set_costs(costs);
    if let (None, Some(file)) = (stored, file) {
        // A later start measures again.
        let _ = cache_dir::replace(&file, &[costs.times().map(|time| time.to_string()).join(" ").as_bytes()]);
    }
    Ok(())
}

/// The file of a model in a device's numerics, on so much of the machine.
fn file(caps: &Caps, fingerprint: u64, engines: usize) -> Option<PathBuf> {
    let (threads, ranks, version) = (par::threads(), caps.ranks, env!("CARGO_PKG_VERSION"));
    let place =
        format!("{version} {} {}, {threads} threads, {ranks} ranks, {engines} engines", numerics(caps), caps.device);
    let name = cache_dir::hash(&[&fingerprint.to_le_bytes(), place.as_bytes()]);
    cache_dir::open("costs").map(|dir| dir.join(format!("{name:032x}")))
}

/// The costs that a file names, if it does; [`TokenCosts::measured`] refuses what cannot be.
fn parse(text: &str) -> Option<TokenCosts> {
    let times = text.split(' ').map(|time| time.parse().ok()).collect::<Option<Vec<f32>>>()?;
    TokenCosts::measured(times.try_into().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_say_nothing_are_not_used() {
        for (text, times) in [
            ("1 1.5 2 3.25", Some([1.0, 1.5, 2.0, 3.25])),
            ("1 1.5 2", None),
            ("1 1.5 2 3 4", None),
            ("1 NaN 2 3", None),
            ("0 0 0 0", None),
            ("", None),
            ("1 a 2 3", None),
        ] {
            assert_eq!(parse(text).map(|costs| costs.times()), times, "{text:?}");
        }
    }
}
