//! The folders of `tests/golden`: which of them run, and the least that a reference must hold.

use std::path::{Path, PathBuf};

use libtest_mimic::{Failed, Trial};
use safetensors::SafeTensors;
use selkie_core::config::Config;
use selkie_core::models;

/// Number of folders, and of those whose family this version knows. A smaller number means that a test was lost.
const FOLDERS: usize = 27;
const RUNNING: usize = 26;
/// Families that this version does not know and reports. A folder of another unknown family fails.
const LATER: [&str; 1] = ["kimi_linear"];
/// Prompts of a reference. The longest one comes with the final states.
const PROMPTS: usize = 2;

/// The folders that run, by name: those of a known family, and those whose configuration cannot be read, so that they fail.
pub fn folders() -> Vec<PathBuf> {
    all().into_iter().filter(|dir| unknown_family(dir).is_none()).collect()
}

/// A test of the number of folders, one of the extent of each reference, and an ignored one for each folder that does not run.
pub fn trials() -> Vec<Trial> {
    let count = || {
        let (all, running) = (all().len(), folders().len());
        if all >= FOLDERS && running >= RUNNING {
            return Ok(());
        }
        Err(Failed::from(format!("{all} folders, {running} of them run; there were {FOLDERS} and {RUNNING}")))
    };
    let mut trials = vec![Trial::test("golden: no folder is lost", count)];
    for dir in all() {
        let name = dir.file_name().expect("a folder").to_string_lossy().into_owned();
        trials.push(match unknown_family(&dir) {
            None => Trial::test(format!("golden: extent of {name}"), move || extent(&dir)),
            Some(family) => {
                let announced = LATER.contains(&family.as_str());
                let why = format!("no family {family:?}");
                let title = format!("golden: {name} ({why})");
                Trial::test(title, move || Err(Failed::from(why))).with_ignored_flag(announced)
            }
        });
    }
    trials
}

fn all() -> Vec<PathBuf> {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let entries = std::fs::read_dir(golden).expect("the references are part of the repository");
    let mut dirs: Vec<PathBuf> = entries.map(|e| e.expect("readable").path()).filter(|p| p.is_dir()).collect();
    dirs.sort();
    dirs
}

fn config(dir: &Path) -> Result<Config, Failed> {
    let bytes = std::fs::read(dir.join("config.json"))?;
    Config::parse("config.json", &bytes).map_err(|e| e.to_string().into())
}

/// The `model_type` of a folder if no family has it.
fn unknown_family(dir: &Path) -> Option<String> {
    let config = config(dir).ok()?;
    let model_type = config.model_type().ok()?;
    models::FAMILIES.iter().all(|f| f.model_type != model_type).then(|| model_type.into())
}

/// Logits of enough prompts, and every state that the model keeps after the longest one.
fn extent(dir: &Path) -> Result<(), Failed> {
    let bytes = std::fs::read(dir.join("reference.safetensors"))?;
    let file = SafeTensors::deserialize(&bytes)?;
    let rows = |name: String| file.tensor(&name).map(|t| t.shape()[0]);
    let (mut prompts, mut longest) = (0, (0, 0));
    while let Ok(tokens) = rows(format!("prompt{prompts}.input_ids")) {
        if rows(format!("prompt{prompts}.logits"))? != tokens {
            return Err(format!("prompt {prompts} has not the logits of all {tokens} tokens").into());
        }
        longest = longest.max((tokens, prompts));
        prompts += 1;
    }
    let spec = models::spec(&config(dir)?).map_err(|e| e.to_string())?;
    let kept = |l: &selkie_core::layer::LayerState| {
        2 * usize::from(l.kv.is_some()) + usize::from(l.conv.is_some()) + usize::from(l.recurrent.is_some())
    };
    let want: usize = spec.layers.iter().map(kept).sum();
    let states = format!("prompt{}.state.", longest.1);
    let found = file.names().iter().filter(|n| n.starts_with(&states)).count();
    if prompts < PROMPTS || want == 0 || found != want {
        return Err(format!("{prompts} prompts, {found} states for {want} of the model").into());
    }
    Ok(())
}
