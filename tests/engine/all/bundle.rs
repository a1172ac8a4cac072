//! Bundles through engines: what one has computed, another continues, bit for bit on the CPU. Free slots and pages are filled
//! with NaN, and all counts are audited after each transfer.

use std::io::Cursor;
use std::path::Path;
use std::sync::Arc;

use pollster::block_on;
use selkie_core::Error;
use selkie_core::backend::Backend;
use selkie_core::bundle::{Head, Identity, Part, Reader, Writer, convert, lineage};
use selkie_core::cpu::CpuBackend;
use selkie_core::digest::Digest;
use selkie_core::engine::{Engine, EngineOptions, Event, Export, Exported, Import, Imported, Request};
use selkie_core::format::Products;
use selkie_core::kv8;
use selkie_core::model_dir::ModelFiles;
use selkie_core::ranks::Ranks;
use selkie_core::session::load;
use selkie_core::source::{Dir, Embedded};
use selkie_core::state::{Realm, Report};
use selkie_core::tensor::DType;

use crate::{models::golden_folders, random::Random, wrapped::Wrapped};

const TINY: Embedded = Embedded {
    label: "tiny",
    files: &[(
        "config.json",
        br#"{"model_type":"nemotron_h","hidden_size":16,"num_attention_heads":2,"num_key_value_heads":1,"head_dim":8,
            "intermediate_size":16,"mamba_num_heads":1,"mamba_head_dim":4,"ssm_state_size":4,"n_groups":1,"conv_kernel":4,
            "vocab_size":40,"hybrid_override_pattern":"M*","max_position_embeddings":1024}"#,
    )],
};

pub(super) fn golden(name: &str) -> ModelFiles {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden").join(name);
    block_on(ModelFiles::open(Arc::new(Dir::open(dir).unwrap()), || 0)).unwrap()
}

fn tiny() -> ModelFiles {
    block_on(ModelFiles::open_random(Arc::new(TINY), || 0, 7, None)).unwrap()
}

pub(super) fn identity(files: &ModelFiles) -> Identity {
    block_on(files.identity(&mut |_| {})).unwrap()
}

pub(super) fn options() -> EngineOptions {
    EngineOptions { slots: Some(12), kv_pages: Some(24), context: Some(512), logits: true, ..EngineOptions::default() }
}

pub(super) fn engine<B: Backend>(backend: B, files: &ModelFiles, options: &EngineOptions) -> Engine<B> {
    block_on(load(backend, files, options, &mut |_| {})).unwrap()
}

pub(super) fn cpu(files: &ModelFiles) -> Engine<CpuBackend> {
    engine(CpuBackend::new(), files, &options())
}

/// The CPU under another name, with late reads: its numerics are others.
pub(super) fn late() -> Wrapped {
    let inner = CpuBackend::new();
    let mut caps = inner.caps().clone();
    (caps.backend, caps.asynchronous) = ("elsewhere", true);
    Wrapped { inner, caps, polls: 2, before: Box::new(|_| Ok(())) }
}

fn elsewhere(files: &ModelFiles) -> Engine<Wrapped> {
    engine(late(), files, &options())
}

pub(super) fn ids(n: usize, seed: u32, vocab: usize) -> Vec<u32> {
    let mixed = |i: u32| i.wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(40_503)) >> 9;
    (0..n as u32).map(|i| 3 + mixed(i) % (vocab as u32 - 3)).collect()
}

#[derive(Debug, Default, PartialEq)]
pub(super) struct Output {
    ids: Vec<u32>,
    logits: Vec<Vec<u32>>,
}

/// Runs one request alone; its answer and report.
pub(super) fn run<B: Backend>(engine: &mut Engine<B>, request: &Request) -> (Output, Report) {
    engine.poison_free().unwrap();
    engine.submit(request.clone()).unwrap();
    let (mut output, mut report) = (Output::default(), None);
    while !engine.is_idle() {
        for event in block_on(engine.step()).unwrap() {
            match event {
                Event::Token { token, logits, .. } => {
                    output.ids.push(token);
                    output.logits.push(logits.unwrap().iter().map(|x| x.to_bits()).collect());
                }
                Event::Finished(end) => report = end.cache,
            }
        }
    }
    engine.scheduler().audit().unwrap();
    (output, report.unwrap())
}

pub(super) fn request(prompt: &[u32], max_tokens: usize) -> Request {
    let boundaries = vec![70, prompt.len()];
    Request { prompt: prompt.to_vec(), max_tokens, boundaries, ..Request::default() }
}

pub(super) fn export<B: Backend>(
    engine: &Engine<B>,
    model: &Identity,
    tokens: &[u32],
    realm: Realm,
) -> (Vec<u8>, Exported) {
    export_from(engine, model, tokens, realm, 0)
}

fn export_from<B: Backend>(
    engine: &Engine<B>,
    model: &Identity,
    tokens: &[u32],
    realm: Realm,
    from: usize,
) -> (Vec<u8>, Exported) {
    let what = Export {
        model: model.clone(),
        name: "test".into(),
        tokens: tokens.to_vec(),
        ends: vec![70],
        messages: None,
        realm,
        states: 8,
        from,
    };
    let mut out = Vec::new();
    let exported = block_on(engine.export(what, "out.bundle", &mut out)).unwrap();
    assert_eq!(exported.bytes, out.len() as u64);
    (out, exported)
}

pub(super) fn import<B: Backend>(engine: &mut Engine<B>, bytes: &[u8], into: &Import) -> Result<Imported, Error> {
    engine.poison_free().unwrap();
    let imported = Reader::open(Cursor::new(bytes), "in.bundle").and_then(|mut r| engine.import(&mut r, into));
    engine.scheduler().audit().unwrap();
    imported
}

pub(super) fn into(model: &Identity) -> Import {
    Import { model: model.clone(), namespace: String::new(), exact_only: false, pieces: false }
}

fn held<B: Backend>(engine: &Engine<B>) -> (usize, usize, usize) {
    let s = engine.scheduler();
    (s.slots().used(), s.pages().used(), s.tree().len())
}

/// A first turn, its bundle, and the tokens of a second turn.
pub(super) fn first_turn<B: Backend>(engine: &mut Engine<B>, model: &Identity, seed: u32) -> (Vec<u8>, Vec<u32>) {
    let vocab = engine.spec().vocab;
    let prompt = ids(190, seed, vocab);
    let (answer, _) = run(engine, &request(&prompt, 12));
    let tokens = [prompt, answer.ids].concat();
    let (bytes, exported) = export(engine, model, &tokens, Realm::default());
    assert_eq!(exported.tokens, 192);
    (bytes, [tokens, ids(30, seed + 1, vocab)].concat())
}

#[test]
fn out_and_in_on_the_cpu_changes_no_bit() {
    for folder in golden_folders() {
        let family = folder.file_name().unwrap().to_str().unwrap();
        let files = golden(family);
        let model = identity(&files);
        let (bytes, second) = first_turn(&mut cpu(&files), &model, 5);

        let mut fresh = cpu(&files);
        let imported = import(&mut fresh, &bytes, &into(&model)).unwrap();
        assert_eq!((imported.tokens, imported.origin.as_str()), (192, ""), "{family}");
        let again = export(&fresh, &model, &second[..202], Realm::default()).0;
        assert_eq!(again, bytes, "{family}: what came in goes out");

        let off = EngineOptions { prefix_cache: false, ..options() };
        let want = run(&mut engine(CpuBackend::new(), &files, &off), &request(&second, 20)).0;
        let (got, report) = run(&mut fresh, &request(&second, 20));
        assert_eq!((report.reused, report.converted), (192, false), "{family}");
        assert_eq!(got, want, "{family}: the continuation");

        // A second import finds everything there and changes nothing.
        let before = held(&fresh);
        let nothing = import(&mut fresh, &bytes, &into(&model)).unwrap();
        assert_eq!((nothing.tokens, nothing.states, nothing.pages), (192, 0, 0), "{family}");
        assert_eq!(held(&fresh), before);
    }
}

#[test]
fn pages_that_the_reader_has_are_left_out() {
    for (family, paged) in [("nemotron_h", true), ("llama", true), ("mamba2", false)] {
        let files = golden(family);
        let model = identity(&files);
        let mut first = cpu(&files);
        let (whole, second) = first_turn(&mut first, &model, 5);
        let mut busy = cpu(&files);
        run(&mut busy, &request(&second[..140], 2));
        let known = busy.scheduler().coverage(&Realm::default(), &second[..200]).known;
        assert_eq!(known, 128, "{family}");
        // More than there is: the last page goes anyway.
        for (from, pages) in [(known, 1), (10_000, 1), (100, 2)] {
            let (bytes, exported) = export_from(&first, &model, &second[..202], Realm::default(), from);
            assert_eq!((exported.tokens, bytes.len() < whole.len()), (192, paged), "{family}");
            let head = Reader::open(Cursor::new(&*bytes), "x").unwrap().head().clone();
            assert_eq!((head.pages(), head.depth()), (if paged { pages } else { 0 }, 192), "{family}");
            let mut fresh = cpu(&files);
            let before = held(&fresh);
            match import(&mut fresh, &bytes, &into(&model)) {
                Err(e) if paged => assert!(e.to_string().contains("no longer in the cache"), "{e}"),
                imported => assert!(!paged && imported.unwrap().tokens == 192, "{family}"),
            }
            assert!(!paged || held(&fresh) == before, "{family}");
        }
        let (rest, _) = export_from(&first, &model, &second[..202], Realm::default(), known);
        let imported = import(&mut busy, &rest, &into(&model)).unwrap();
        assert_eq!((imported.tokens, imported.pages), (192, usize::from(paged)), "{family}");
        let off = EngineOptions { prefix_cache: false, ..options() };
        let want = run(&mut engine(CpuBackend::new(), &files, &off), &request(&second, 20)).0;
        let (got, report) = run(&mut busy, &request(&second, 20));
        assert_eq!((report.reused, got == want), (192, true), "{family}");
    }
}

#[test]
fn a_bundle_joins_what_runs_and_what_is_there() {
    let files = golden("nemotron_h");
    let model = identity(&files);
    let mut first = cpu(&files);
    let (bytes, second) = first_turn(&mut first, &model, 5);
    let off = EngineOptions { prefix_cache: false, ..options() };
    let want = run(&mut engine(CpuBackend::new(), &files, &off), &request(&second, 20)).0;
    // The engine's own request is in the middle of the same path when the bundle comes, at any step.
    for steps in 0..8 {
        let inner = CpuBackend::new();
        let caps = selkie_core::backend::Caps { asynchronous: true, ..inner.caps().clone() };
        let small = EngineOptions { step_tokens: 40, ..options() };
        let backend = Wrapped { inner, caps, polls: 1, before: Box::new(|_| Ok(())) };
        let mut busy = engine(backend, &files, &small);
        busy.submit(request(&second, 20)).unwrap();
        let mut tokens = Vec::new();
        let mut take = |events: Vec<Event>| {
            tokens.extend(events.into_iter().filter_map(|e| match e {
                Event::Token { token, .. } => Some(token),
                Event::Finished(_) => None,
            }));
        };
        for _ in 0..steps {
            take(block_on(busy.step()).unwrap());
        }
        let imported = import(&mut busy, &bytes, &into(&model)).unwrap();
        assert_eq!(imported.tokens, 192);
        while !busy.is_idle() {
            take(block_on(busy.step()).unwrap());
            busy.poison_free().unwrap();
            busy.scheduler().audit().unwrap();
        }
        assert_eq!(tokens, want.ids, "after {steps} steps");
        let (got, report) = run(&mut busy, &request(&second, 20));
        assert!(report.reused >= 192);
        assert_eq!(got, want, "after {steps} steps");
    }
}

#[test]
fn a_bundle_enters_one_namespace_only() {
    let files = golden("lfm2");
    let model = identity(&files);
    let (bytes, second) = first_turn(&mut cpu(&files), &model, 1);
    let mut engine = cpu(&files);
    import(&mut engine, &bytes, &Import { namespace: "one".into(), ..into(&model) }).unwrap();
    for (namespace, reused) in [("", 0), ("two", 0), ("one", 192)] {
        let (_, report) = run(&mut engine, &Request { namespace: namespace.into(), ..request(&second, 2) });
        assert_eq!(report.reused, reused, "{namespace}");
    }
}

#[test]
fn converted_values_live_under_a_root_of_their_own() {
    let files = golden("nemotron_h");
    let model = identity(&files);
    let mut there = elsewhere(&files);
    let (bytes, second) = first_turn(&mut there, &model, 3);
    let mut here = cpu(&files);
    let error = import(&mut here, &bytes, &Import { exact_only: true, ..into(&model) }).unwrap_err().to_string();
    assert!(error.contains("in.bundle") && error.contains("elsewhere") && error.contains(&here.numerics()), "{error}");
    assert_eq!(held(&here), (0, 0, 0));

    let imported = import(&mut here, &bytes, &into(&model)).unwrap();
    assert_eq!(imported.origin, there.numerics());
    let shared = run(&mut here, &request(&second, 4));
    assert_eq!((shared.1.reused, shared.1.converted), (0, false), "nothing under the shared root");
    let asked = Request { origin: imported.origin.clone(), ..request(&second, 4) };
    let (output, report) = run(&mut here, &asked);
    assert_eq!((report.reused, report.converted), (192, true));
    assert_eq!(output, shared.0, "these values happen to be equal");
    let other = Request { namespace: "tenant".into(), ..asked.clone() };
    assert_eq!(run(&mut here, &other).1.reused, 0);

    // What goes out from there never comes in as exact, neither here nor where it came from.
    let realm = Realm { origin: imported.origin.clone(), ..Realm::default() };
    let (again, _) = export(&here, &model, &second, realm);
    let numerics = Reader::open(Cursor::new(&again), "x").unwrap().head().numerics.clone();
    assert_eq!(numerics, lineage(&there.numerics(), &here.numerics()));
    for origin in [
        import(&mut here, &again, &into(&model)).unwrap().origin,
        import(&mut there, &again, &into(&model)).unwrap().origin,
    ] {
        assert_eq!(origin, numerics);
    }
}

/// All values of a bundle, in its order.
pub(super) fn values(bytes: &[u8]) -> Vec<f32> {
    let mut all = Vec::new();
    let add = &mut |part: &Part, _: usize, row: &[u8]| {
        all.extend(kv8::to_f32(part.dtype, row, part.width()));
        Ok(())
    };
    Reader::open(Cursor::new(bytes), "x").unwrap().rows(add).unwrap();
    all
}

/// Whether all values are the same but for the order of sums.
fn near(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-4 * (1.0 + b.abs()))
}

/// The answer to a second turn after a bundle of other numerics.
fn continued<B: Backend>(engine: &mut Engine<B>, bytes: &[u8], model: &Identity, second: &[u32]) -> (Output, Report) {
    let origin = import(engine, bytes, &into(model)).unwrap().origin;
    run(engine, &Request { origin, ..request(second, 12) })
}

#[test]
fn several_ranks_join_their_states_and_split_those_of_one() {
    let floats = |output: &Output| output.logits.concat().into_iter().map(f32::from_bits).collect::<Vec<f32>>();
    // One KV head, group or key head for two ranks in some.
    for (family, ranks) in [
        ("nemotron_h", 2),
        ("nemotron_h", 4),
        ("mamba", 2),
        ("qwen3_next", 2),
        ("qwen3_next", 4),
        ("lfm2", 2),
        ("jamba", 2),
        ("falcon_h1", 2),
        ("granitemoehybrid", 4),
        ("zamba2", 2),
        ("zamba2_blocks", 4),
    ] {
        let files = golden(family);
        let model = identity(&files);
        let several = || engine(Ranks::open(ranks, Products::default()).unwrap(), &files, &options());
        let mut one = cpu(&files);
        let (of_one, second) = first_turn(&mut one, &model, 5);
        let want = run(&mut one, &request(&second, 12)).0;

        let mut there = several();
        let (of_all, same) = first_turn(&mut there, &model, 5);
        assert_eq!(same, second, "{family}: the answer on {ranks} ranks");
        assert!(near(&values(&of_all), &values(&of_one)), "{family}: states of {ranks} ranks");
        let whole = run(&mut there, &request(&second, 12)).0;

        let mut fresh = several();
        assert_eq!(import(&mut fresh, &of_all, &into(&model)).unwrap().origin, "", "{family}");
        let (got, report) = run(&mut fresh, &request(&second, 12));
        assert!(report.reused == 192 && got == whole, "{family}: {ranks} ranks continue {ranks}");

        for (got, report) in
            [continued(&mut several(), &of_one, &model, &second), continued(&mut cpu(&files), &of_all, &model, &second)]
        {
            assert!(report.reused == 192 && report.converted, "{family}, {ranks} ranks: {report:?}");
            assert!(got.ids == want.ids && near(&floats(&got), &floats(&want)), "{family}, {ranks} ranks");
        }
    }
}

/// The bundle with values of another dtype, as another device would have written it.
fn rewritten(bytes: &[u8], dtype: DType, change: impl FnOnce(&mut Head)) -> Vec<u8> {
    let reader = Reader::open(Cursor::new(bytes), "x").unwrap();
    let mut head = reader.head().clone();
    head.parts.iter_mut().for_each(|part| part.dtype = dtype);
    head.numerics = "another device".into();
    change(&mut head);
    let mut writer = Writer::new(Vec::new(), &head).unwrap();
    let put = &mut |part: &Part, _, row: &[u8]| {
        writer.write(convert(row, part.dtype, dtype, part.width()).unwrap().into_owned()).unwrap();
        Ok(())
    };
    reader.rows(put).unwrap();
    writer.finish().unwrap().0
}

#[test]
fn values_of_other_dtypes_are_converted() {
    let files = golden("qwen3_next");
    let model = identity(&files);
    let (bytes, second) = first_turn(&mut cpu(&files), &model, 3);
    let rounded = rewritten(&bytes, DType::Bf16, |_| {});
    let mut engine = cpu(&files);
    let imported = import(&mut engine, &rounded, &into(&model)).unwrap();
    let realm = Realm { origin: imported.origin.clone(), ..Realm::default() };
    let (again, _) = export(&engine, &model, &second[..202], realm);
    assert_eq!(values(&again), values(&rounded), "bf16 fits into f32");
    let (exact, near) = (values(&bytes), values(&again));
    assert!(exact != near && exact.iter().zip(&near).all(|(a, b)| (a - b).abs() <= a.abs() / 200.0));
    let (_, report) = run(&mut engine, &Request { origin: imported.origin, ..request(&second, 4) });
    assert_eq!((report.reused, report.converted), (192, true));

    // This engine's own numerics exclude these dtypes.
    let own = engine.numerics();
    let lie = rewritten(&bytes, DType::Bf16, |head| head.numerics = own);
    let error = import(&mut engine, &lie, &into(&model)).unwrap_err().to_string();
    assert!(error.contains("tensor `layers.") && error.contains("Bf16"), "{error}");
}

#[test]
fn refused_bundles_leave_the_pools_untouched() {
    let files = golden("nemotron_h");
    let model = identity(&files);
    let (bytes, _) = first_turn(&mut cpu(&files), &model, 3);
    let mut engine = cpu(&files);
    run(&mut engine, &request(&ids(130, 9, 300), 2));
    let before = held(&engine);
    let mut refuse = |bytes: &[u8], into: &Import, why: &str| {
        let error = import(&mut engine, bytes, into).expect_err(why).to_string();
        assert!(error.starts_with("in.bundle: ") && error.contains(why), "{why}: {error}");
        assert_eq!(held(&engine), before, "{why}");
    };
    let mut altered = bytes.clone();
    let middle = altered.len() * 2 / 3;
    altered[middle] ^= 16;
    refuse(&altered, &into(&model), "does not have the checksum");
    refuse(&bytes[..bytes.len() - 1], &into(&model), "truncated");
    refuse(&rewritten(&bytes, DType::F32, |h| h.tokens[3] = 1 << 20), &into(&model), "outside the vocabulary");
    for (n, what) in [(0, "weights"), (1, "config"), (2, "tokenizer")] {
        let mut other = model.clone();
        *[&mut other.weights, &mut other.config, &mut other.tokenizer][n] = Digest::of(b"another");
        refuse(&bytes, &into(&other), what);
    }
    // The head of another model's shapes with this model's digests.
    let cousin = golden("mamba2");
    let (foreign, _) = first_turn(&mut cpu(&cousin), &identity(&cousin), 3);
    refuse(&rewritten(&foreign, DType::F32, |h| h.model = model.clone()), &into(&model), "tensor `layers.");
}

#[test]
fn too_little_room_is_said_with_numbers() {
    let files = golden("nemotron_h");
    let model = identity(&files);
    let (bytes, second) = first_turn(&mut cpu(&files), &model, 3);
    let with = |slots, kv_pages, prefix_cache| {
        let options = EngineOptions { slots: Some(slots), kv_pages: Some(kv_pages), prefix_cache, ..options() };
        engine(CpuBackend::new(), &files, &options)
    };
    let error = import(&mut with(4, 2, true), &bytes, &into(&model)).unwrap_err().to_string();
    assert!(error.contains("needs 3 KV pages") && error.contains("2 of 2"), "{error}");
    let error = import(&mut with(4, 8, false), &bytes, &into(&model)).unwrap_err().to_string();
    assert!(error.contains("prefix cache"), "{error}");
    // One slot holds the deepest state, and what else is cached makes room.
    let mut narrow = with(1, 6, true);
    run(&mut narrow, &request(&ids(200, 9, 300), 2));
    let imported = import(&mut narrow, &bytes, &into(&model)).unwrap();
    assert_eq!((imported.tokens, imported.states, imported.pages), (192, 1, 3));
    assert_eq!(run(&mut narrow, &request(&second, 2)).1.reused, 192);
    // A running sequence keeps its only slot.
    let mut busy = with(1, 8, true);
    busy.submit(request(&ids(100, 9, 300), 30)).unwrap();
    block_on(busy.step()).unwrap();
    let before = held(&busy);
    let error = import(&mut busy, &bytes, &into(&model)).unwrap_err().to_string();
    assert!(error.contains("no free slot"), "{error}");
    assert_eq!(held(&busy), before);
}

#[test]
fn nothing_to_save_is_an_error_and_writes_nothing() {
    let files = golden("lfm2");
    let model = identity(&files);
    let engine = cpu(&files);
    let realm = Realm::default();
    let what = Export {
        model,
        name: String::new(),
        tokens: ids(99, 1, 300),
        ends: vec![],
        messages: None,
        realm,
        states: 1,
        from: 0,
    };
    let mut out = Vec::new();
    let error = block_on(engine.export(what, "out.bundle", &mut out)).unwrap_err().to_string();
    assert!(error.contains("out.bundle") && error.contains("99 tokens") && out.is_empty(), "{error}");
}

#[test]
fn digests_name_the_contents_of_a_model() {
    let (a, b) = (identity(&golden("llama")), identity(&golden("llama_bias3")));
    assert_eq!(a, identity(&golden("llama")));
    assert!(a.weights != b.weights && a.config != b.config);
    let mut last = 0;
    let files = golden("llama");
    block_on(files.identity(&mut |done| last = done)).unwrap();
    assert_eq!(last, files.checkpoint.bytes());
}

/// Makes all checksums of a bundle right again, if its header can still be read that far.
fn resum(bytes: &mut [u8]) -> Option<()> {
    let header = 8usize.checked_add(u64::from_le_bytes(*bytes.first_chunk()?).try_into().ok()?)?;
    let json: serde_json::Value = serde_json::from_slice(bytes.get(8..header)?).ok()?;
    let mut ranges: Vec<_> = std::iter::once(0..header).collect();
    let mut at = bytes.len();
    for (name, tensor) in json.as_object()?.iter().filter(|(name, _)| *name != "__metadata__") {
        let offset = |i: usize| header.checked_add(usize::try_from(tensor["data_offsets"][i].as_u64()?).ok()?);
        match name.as_str() {
            "checksums" => at = offset(0)?,
            _ => ranges.push(offset(0)?..offset(1)?),
        }
    }
    for (i, range) in ranges.into_iter().enumerate() {
        let sum = Digest::of(bytes.get(range)?).0;
        bytes.get_mut(at + 32 * i..at + 32 * (i + 1))?.copy_from_slice(&sum);
    }
    Some(())
}

#[test]
fn ten_thousand_damaged_bundles_end_in_errors() {
    let files = tiny();
    let model = identity(&files);
    let mut source = cpu(&files);
    let prompt = ids(130, 3, 40);
    run(&mut source, &request(&prompt, 1));
    let (good, _) = export(&source, &model, &prompt, Realm::default());
    assert!(good.len() < 1 << 15, "{} bytes", good.len());
    let mut engine = cpu(&files);
    let (mut random, mut accepted) = (Random(1), 0);
    let empty = held(&engine);
    let header = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    for case in 0..10_000 {
        let mut bytes = good.clone();
        // Half of the damage is in the header, which is the smaller part.
        let within = if random.below(2) == 0 { header } else { good.len() };
        for _ in 0..1 + random.below(3) {
            let at = random.below(within.min(bytes.len()));
            match random.below(6) {
                0 => bytes.truncate(at),
                1 => drop(bytes.drain(at..(at + 1 + random.below(9)).min(bytes.len()))),
                2 => bytes.insert(at, random.below(256) as u8),
                3 if bytes[at].is_ascii_digit() => bytes[at] = b'0' + random.below(10) as u8,
                _ => bytes[at] ^= 1 << random.below(8),
            }
            if bytes.is_empty() {
                break;
            }
        }
        let right = random.below(4) > 0 && resum(&mut bytes).is_some();
        let result = Reader::open(Cursor::new(&bytes), "x").and_then(|mut r| engine.import(&mut r, &into(&model)));
        match result {
            Err(_) => assert_eq!(held(&engine), empty, "case {case}"),
            // Other values and other tokens with right checksums are a bundle; so is one that is as it was.
            Ok(imported) => {
                assert!(right || bytes == good, "case {case}: accepted with wrong checksums");
                assert!(imported.tokens == 128 && held(&engine) != empty, "case {case}");
                accepted += 1;
                engine.clear_cache();
            }
        }
        if case % 100 == 0 {
            engine.scheduler().audit().unwrap();
        }
    }
    engine.scheduler().audit().unwrap();
    assert!((100..6000).contains(&accepted), "{accepted} of 10,000 were accepted");
}
