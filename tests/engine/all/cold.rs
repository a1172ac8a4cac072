//! States as int8 in the lower tiers: what comes back is near, says `converted` and never reaches what is exact.

use std::{fs, path::Path};

use pollster::block_on;
use selkie_core::{
    backend::Backend,
    engine::{Engine, EngineOptions, Finished, Request},
    state::Realm,
    tensor::DType,
    tier::{ColdDtype, DiskOptions, Rates, TierOptions},
};

use crate::{
    behind::Behind,
    heads,
    models::{TestModel, golden_models, micro_models},
    promise::{Alone, Asked, Drafts, run_cold},
    tiers::{Folder, lifted, request, run, small},
};

fn int8(disk: Option<DiskOptions>, host: u64) -> TierOptions {
    TierOptions { host, disk, cold: ColdDtype::Int8, rates: Rates::ALWAYS }
}

fn exact(disk: Option<DiskOptions>, host: u64) -> TierOptions {
    TierOptions { cold: ColdDtype::Exact, ..int8(disk, host) }
}

/// Whether states of a model have rows that become smaller.
fn converts(model: &TestModel) -> bool {
    model.architecture.spec().layers.iter().any(|layer| layer.recurrent.is_some())
}

/// Tokens from host memory and from disk, and whether the answer says that it is converted. If it does not, it is that of the request
/// alone; if it does, its logits are near.
fn ask(engine: &mut Engine<Behind>, alone: &mut Alone<'_>, request: Request) -> ([usize; 2], bool) {
    let asked = Asked::plain(request);
    let (output, end) = run(engine, asked.request());
    let (report, expected) = (end.cache.unwrap(), alone.run(&asked));
    assert!(report.converted || output == expected, "an exact answer differs from the request alone");
    assert!(difference(&output.1[0], &expected.1[0]) < 0.5, "{}", difference(&output.1[0], &expected.1[0]));
    ([report.host, report.disk], report.converted)
}

/// Waits for what is on its way to the tiers.
fn settle(engine: &mut Engine<Behind>) {
    assert!(block_on(engine.step()).unwrap().is_empty(), "it is idle");
}

/// The largest difference.
fn difference(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |most, d| if d.is_nan() { f32::NAN } else { most.max(d) })
}

#[test]
fn what_comes_back_says_that_it_is_converted_in_every_family() {
    for model in golden_models() {
        let folder = Folder::new("cold-families");
        let (vocab, mut alone) = (model.architecture.spec().vocab, Alone::new(&model, 256));
        let mut ask = |engine: &mut _, seed| ask(engine, &mut alone, request(seed, vocab));
        let disk = || Some(folder.options(1 << 30));
        let mut first = small(&model, int8(disk(), 1 << 30));
        let (back, yes) = ([1, 2, 1, 2].map(|seed| ask(&mut first, seed)), converts(&model));
        assert_eq!(back, [([0, 0], false), ([0, 0], false), ([192, 0], yes), ([192, 0], yes)], "{}", model.name);
        assert_eq!(first.stats().tiers.converted, if yes { 2 } else { 0 }, "{}", model.name);
        drop(first);
        let coded = folder.files().iter().filter(|f| f.extension().is_some_and(|e| e == "int8")).count();
        assert_eq!(coded > 0, yes, "{}", model.name);
        let mut second = small(&model, int8(disk(), 0));
        assert_eq!(ask(&mut second, 1), ([0, 192], yes), "{}", model.name);
        drop(second);
        // Without the option such files are not used.
        let mut third = small(&model, exact(disk(), 0));
        assert_eq!(ask(&mut third, 1), (if yes { [0, 0] } else { [0, 192] }, false), "{}", model.name);
    }
}

#[test]
fn pages_that_the_device_still_has_are_copied() {
    for model in &micro_models() {
        for host in [0, 1 << 30] {
            let folder = Folder::new("cold-near");
            let (vocab, mut alone) = (model.architecture.spec().vocab, Alone::new(model, 256));
            let options = EngineOptions {
                context: Some(256),
                slots: Some(2),
                kv_pages: Some(40),
                max_batch: 1,
                logits: true,
                tiers: int8(Some(folder.options(1 << 30)), host),
                ..EngineOptions::default()
            };
            let mut engine = model.engine(&options, true);
            let asked = |seed| request(seed, vocab);
            for seed in [1, 2] {
                assert_eq!(ask(&mut engine, &mut alone, asked(seed)), ([0, 0], false));
            }
            settle(&mut engine);
            // A thread writes.
            while host == 0 && engine.stats().tiers.disk_values == 0 && converts(model) {
                std::thread::yield_now();
            }
            let (back, converted) = ask(&mut engine, &mut alone, asked(1));
            assert_eq!((back.iter().sum::<usize>(), converted), if converts(model) { (192, true) } else { (0, false) });
        }
    }
}

#[test]
fn exact_values_are_preferred_where_they_lead_as_far() {
    let model = &micro_models()[2];
    let (vocab, mut alone) = (model.architecture.spec().vocab, Alone::new(model, 256));
    let options = EngineOptions {
        slots: Some(2),
        kv_pages: Some(12),
        context: Some(256),
        max_batch: 1,
        logits: true,
        tiers: int8(None, 1 << 30),
        ..EngineOptions::default()
    };
    let mut engine = model.engine(&options, false);
    let mut ask = |request| ask(&mut engine, &mut alone, request);
    let _ = [1, 2].map(|seed| ask(request(seed, vocab)));
    assert_eq!(ask(request(1, vocab)), ([192, 0], true));
    // The converted state is on the device now, nothing exact is.
    assert_eq!(ask(request(1, vocab)), ([0, 0], true));
    // Such a request computes all of its prompt, so it leaves an exact state.
    assert!(!ask(Request { prompt_logprobs: Some(0), ..request(1, vocab) }).1);
    assert_eq!(ask(request(1, vocab)), ([0, 0], false));
    assert_eq!(ask(Request { namespace: "other".into(), ..request(1, vocab) }), ([0, 0], false));
}

#[test]
fn the_room_of_a_state_is_what_is_stored() {
    let model = &micro_models()[2];
    let vocab = model.architecture.spec().vocab;
    let mut alone = Alone::new(model, 256);
    let bytes = [exact(None, 1 << 30), int8(None, 1 << 30)].map(|tiers| {
        let mut engine = small(model, tiers);
        let _ = [1, 2, 3].map(|seed| run(&mut engine, request(seed, vocab)));
        settle(&mut engine);
        let stats = engine.stats().tiers;
        (stats.host_values, stats.host_bytes)
    });
    let states =
        |layer: &selkie_core::layer::LayerState| layer.recurrent.map_or(0, |[h, p, n]| h * p * (4 * n - 4 - n));
    let saved: usize = model.architecture.spec().layers.iter().map(states).sum();
    assert_eq!(bytes[0].0, bytes[1].0, "{bytes:?}");
    assert!(
        saved > 0 && (bytes[0].1 - bytes[1].1).is_multiple_of(saved as u64) && bytes[0].1 > bytes[1].1,
        "{bytes:?}"
    );
    // Room for coded values only.
    let mut engine = small(model, int8(None, bytes[1].1));
    let back = [1, 2, 1].map(|seed| ask(&mut engine, &mut alone, request(seed, vocab)));
    assert_eq!(back[2], ([192, 0], true));
}

#[test]
fn damaged_states_are_never_used() {
    let model = &micro_models()[2];
    let (vocab, mut alone) = (model.architecture.spec().vocab, Alone::new(model, 256));
    for harm in ["cut", "flipped", "exact", "gone"] {
        let folder = Folder::new("cold-harm");
        let disk = || Some(folder.options(1 << 30));
        let mut engine = small(model, int8(disk(), 0));
        let _ = [1, 2, 3].map(|seed| ask(&mut engine, &mut alone, request(seed, vocab)));
        drop(engine);
        let files = folder.files();
        let mut engine = small(model, int8(disk(), 0));
        for file in files.iter().filter(|f| f.extension().is_some_and(|e| e == "int8")) {
            let mut bytes = fs::read(file).unwrap();
            match harm {
                "cut" => bytes.truncate(70),
                "flipped" => bytes[100] ^= 1,
                // The head says which of both it is.
                _ => bytes[48] = 2,
            }
            fs::write(file, bytes).unwrap();
            if harm == "gone" {
                fs::remove_file(file).unwrap();
            }
        }
        assert_eq!(ask(&mut engine, &mut alone, request(1, vocab)), ([0, 0], false), "{harm}");
    }
}

#[test]
fn the_promise_holds_beside_converted_states() {
    let [host, disk, _, converted] = run_cold(micro_models(), 250, Drafts::None, ColdDtype::Int8);
    assert!(host > 1000 && disk > 100 && converted > 100, "{host} from host memory, {disk} from disk, {converted}");
}

#[test]
fn so_it_does_for_real_families_and_with_drafts() {
    run_cold(golden_models(), 8, Drafts::None, ColdDtype::Int8);
    run_cold(micro_models(), 40, Drafts::Given, ColdDtype::Int8);
    run_cold(heads::models(), 30, Drafts::Head, ColdDtype::Int8);
}

#[test]
fn what_an_exact_tier_holds_is_not_touched_by_the_option() {
    // The names of exact values are the same with and without it.
    let model = &micro_models()[2];
    let (vocab, mut alone) = (model.architecture.spec().vocab, Alone::new(model, 256));
    let folder = Folder::new("cold-beside");
    let disk = || Some(folder.options(1 << 30));
    for tiers in [exact(disk(), 0), int8(disk(), 0)] {
        let mut engine = small(model, tiers);
        let _ = [1, 2, 3].map(|seed| ask(&mut engine, &mut alone, request(seed, vocab)));
    }
    let mut engine = small(model, exact(disk(), 0));
    assert_eq!(lifted(&mut engine, &mut alone, request(1, vocab)), [0, 192]);
}

/// Recurrent states at the end of the deepest prefix of a realm, of all layers.
fn states(engine: &Engine<Behind>, realm: &Realm) -> Vec<Vec<f32>> {
    let tree = engine.scheduler().tree();
    let root = tree.find_root(realm).unwrap();
    let nodes = tree.iter().filter(|(_, node)| node.root == root && node.slot != 0);
    let slot = nodes.max_by_key(|(_, node)| node.depth).unwrap().1.slot as usize;
    let pools = engine.runner().pools().iter().flat_map(|layer| &layer.recurrent);
    let read = |pool: &_| block_on(engine.runner().backend().read(pool)).unwrap();
    pools.map(|pool| DType::F32.to_f32(&read(&pool.slice_rows(slot, 1)))).collect()
}

/// How far a restored state and what follows from it are from the exact ones.
struct Error {
    /// Of the elements of a layer's state, relative to its largest one.
    most: f32,
    mean: f64,
    /// Of the logits of a token: of the one in the middle, and of the worst.
    logits: [f32; 2],
    largest_logit: f32,
    equal: usize,
}

/// Answers a prompt twice, the second time from a state that was in host memory.
fn measure(model: &TestModel, seed: u64) -> (Error, Finished) {
    const TOKENS: usize = 48;
    let vocab = model.architecture.spec().vocab;
    let asked = |seed| Asked::plain(Request { max_tokens: TOKENS, ..request(seed, vocab) });
    let options = |tiers| EngineOptions {
        context: Some(256),
        slots: Some(2),
        kv_pages: Some(4),
        max_batch: 1,
        logits: true,
        // A reference answer leaves its own states out, so that the deepest one is that of the prompt.
        policy: selkie_core::state::CapturePolicy::OnePerPrefill,
        tiers,
        ..EngineOptions::default()
    };
    let mut own = model.engine(&options(TierOptions::default()), false);
    let (expected, _) = run(&mut own, asked(seed).request());
    let mut engine = model.engine(&options(int8(None, 1 << 30)), false);
    let _ = [seed, seed + 1].map(|seed| run(&mut engine, asked(seed).request()));
    let (output, end) = run(&mut engine, asked(seed).request());
    let numerics = engine.numerics();
    let cold = Realm { origin: format!("{numerics}, states as int8"), ..Realm::default() };
    let (mut most, mut sum, mut count) = (0.0f32, 0.0f64, 0);
    for (was, is) in states(&own, &Realm::default()).iter().zip(&states(&engine, &cold)) {
        let largest = was.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        most = most.max(difference(was, is) / largest);
        sum += was.iter().zip(is).map(|(a, b)| f64::from((a - b).abs() / largest)).sum::<f64>();
        count += was.len() as u32;
    }
    let (ids, logits) = (&output.0, &output.1);
    let equal = ids.iter().zip(&expected.0).take_while(|(a, b)| a == b).count();
    // As long as both continue the same text.
    let same = logits.iter().zip(&expected.1).take(equal + 1);
    let mut logits: Vec<f32> = same.map(|(a, b)| difference(a, b)).collect();
    logits.sort_by(f32::total_cmp);
    let error = Error {
        most,
        mean: sum / f64::from(count),
        logits: [logits[logits.len() / 2], logits[logits.len() - 1]],
        largest_logit: expected.1.iter().flatten().fold(0.0f32, |most, x| most.max(x.abs())),
        equal,
    };
    (error, end)
}

/// The table of docs/cache.md: `cargo test --test all cold::the_error -- --nocapture`.
#[test]
fn the_error_of_a_restored_state_is_small() {
    println!(
        "| family | bytes of a state | as int8 | largest error | mean | largest logit | error | at most | equal ids |"
    );
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    // The demo's products would round activations, which adds to the errors of states.
    let demo = TestModel::golden(&demo).map(TestModel::exact);
    for model in golden_models().into_iter().chain(demo).filter(converts) {
        let spec = model.architecture.spec();
        let exact = small(&model, TierOptions::default()).sizes().shape.slot_bytes;
        let saved = |layer: &selkie_core::layer::LayerState| layer.recurrent.map_or(0, |[h, p, n]| h * p * (3 * n - 4));
        let coded = exact - spec.layers.iter().map(saved).sum::<usize>() as u64;
        let (error, end) = measure(&model, 1);
        assert!(end.cache.is_some_and(|cache| cache.converted && cache.host == 192), "{}: {:?}", model.name, end.cache);
        println!(
            "| {} | {exact} | {coded} | {:.4} | {:.5} | {:.2} | {:.4} | {:.4} | {} of 48 |",
            model.name, error.most, error.mean, error.largest_logit, error.logits[0], error.logits[1], error.equal
        );
        // Half a step of 127 of the largest element.
        assert!(error.most <= 0.5 / 127.0 + 1e-6 && error.mean < 1e-3, "{}", model.name);
        // One token may get another expert, so the worst one says little.
        assert!(error.logits[0] <= 0.01 * error.largest_logit, "{}: {:?}", model.name, error.logits);
    }
}
