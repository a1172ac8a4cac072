//! Pieces of prefixes that leave an engine while it runs: another one goes on from them, bit for bit on the CPU.

use std::io::Cursor;

use pollster::block_on;
use selkie_core::Error;
use selkie_core::backend::Backend;
use selkie_core::bundle::Reader;
use selkie_core::cpu::CpuBackend;
use selkie_core::engine::{Engine, EngineOptions, Export, Import, Piece};
use selkie_core::format::Products;
use selkie_core::ranks::Ranks;
use selkie_core::state::Realm;

use crate::bundle::{cpu, engine, export, golden, identity, ids, import, into, late, options, request, run};

/// Pieces of what an engine has of some tokens from a place on, as bundles; all of it if they are `whole`.
fn pieces<B: Backend>(engine: &mut Engine<B>, what: &Export, whole: bool) -> Result<Vec<Piece>, Error> {
    let (mut pieces, mut what) = (Vec::new(), what.clone());
    loop {
        let (send, arrived) = std::sync::mpsc::channel();
        let hand_on = Box::new(move |piece| send.send(piece).unwrap());
        let Some(leaving) = engine.copy_out(what.clone(), whole, hand_on)? else { return Ok(pieces) };
        let piece = loop {
            match arrived.try_recv() {
                Ok(piece) => break piece,
                Err(_) => drop(block_on(engine.step())?),
            }
        };
        assert_eq!(piece.left(), leaving);
        what.from = leaving.depth;
        pieces.push(piece);
        if leaving.last {
            return Ok(pieces);
        }
    }
}

/// A prompt leaves one engine while that computes it, and another one goes on from it.
fn leaves_in_pieces<B: Backend>(backend: impl Fn() -> B, folder: &str) {
    let files = golden(folder);
    let model = identity(&files);
    // A page each.
    let options = EngineOptions { outgoing: 8, outgoing_bytes: 1, step_tokens: 70, ..options() };
    let mut source = engine(backend(), &files, &options);
    let mut target = engine(backend(), &files, &options);
    let prompt = ids(330, 5, source.spec().vocab);
    let what = Export {
        model: model.clone(),
        name: "test".into(),
        tokens: prompt[..320].to_vec(),
        ends: vec![],
        messages: None,
        realm: Realm::default(),
        states: 1,
        from: 0,
    };
    let bring = |target: &mut Engine<B>, piece: &Piece| {
        let mut bytes = Vec::new();
        assert_eq!((piece.write(&mut bytes).unwrap(), piece.bytes()), (bytes.len() as u64, bytes.len() as u64));
        target.poison_free().unwrap();
        let mut bundle = Reader::open(Cursor::new(bytes), "piece").unwrap();
        assert_eq!(bundle.head().depth(), piece.left().depth);
        let imported = target.import(&mut bundle, &Import { pieces: true, ..into(&model) }).unwrap();
        target.scheduler().audit().unwrap();
        imported
    };
    source.submit(request(&prompt, 1)).unwrap();
    let (mut sent, mut early) = (what.clone(), 0);
    while !source.is_idle() {
        drop(block_on(source.step()).unwrap());
        for piece in pieces(&mut source, &sent, false).unwrap() {
            assert!(!piece.left().last && piece.left().depth > sent.from);
            sent.from = piece.left().depth;
            bring(&mut target, &piece);
            early += 1;
        }
        source.poison_free().unwrap();
    }
    let shape = source.sizes().shape;
    assert_eq!(early > 1, shape.has_pages(), "{early} pieces came before the end");
    let rest = pieces(&mut source, &sent, true).unwrap();
    let imported = rest.iter().map(|piece| bring(&mut target, piece)).last().unwrap();
    assert_eq!(imported.tokens, 320);
    // The same as of one bundle of all, and as computed.
    let whole = export(&source, &model, &what.tokens, Realm::default()).0;
    let mut other = engine(backend(), &files, &options);
    import(&mut other, &whole, &into(&model)).unwrap();
    let (want, report) = run(&mut other, &request(&prompt, 6));
    assert_eq!(report.reused, 320);
    let (got, report) = run(&mut target, &request(&prompt, 6));
    assert_eq!((got, report.reused), (want, 320));
}

#[test]
fn a_prompt_leaves_while_it_is_computed() {
    for folder in ["nemotron_h", "mamba2", "llama", "lfm2", "kimi_linear", "qwen3_next"] {
        leaves_in_pieces(CpuBackend::new, folder);
    }
    leaves_in_pieces(late, "nemotron_h");
    for (ranks, folder) in
        [(2, "nemotron_h"), (4, "nemotron_h"), (2, "kimi_linear"), (2, "qwen3_next"), (4, "zamba2_blocks")]
    {
        leaves_in_pieces(|| Ranks::open(ranks, Products::default()).unwrap(), folder);
    }
}

#[test]
fn what_leaves_has_an_end_and_a_limit() {
    let files = golden("nemotron_h");
    let what = Export {
        model: identity(&files),
        name: String::new(),
        tokens: ids(192, 1, 300),
        ends: vec![],
        messages: None,
        realm: Realm::default(),
        states: 1,
        from: 0,
    };
    let error = pieces(&mut cpu(&files), &what, true).err().unwrap().to_string();
    assert!(error.contains("no memory for what leaves"), "{error}");
    let mut source = engine(CpuBackend::new(), &files, &EngineOptions { outgoing: 1, ..options() });
    assert!(pieces(&mut source, &what, false).unwrap().is_empty());
    let error = pieces(&mut source, &what, true).err().unwrap().to_string();
    assert!(error.contains("holds nothing"), "{error}");
    run(&mut source, &request(&what.tokens, 1));
    // As long as one is not dropped there is no other, and the engine is not held up by it.
    let first = pieces(&mut source, &what, true).unwrap();
    assert!(first[0].left().last && source.is_idle());
    assert!(pieces(&mut source, &what, true).unwrap().is_empty());
    drop(first);
    assert_eq!(pieces(&mut source, &what, true).unwrap().len(), 1);
    // A piece without its state is of use to those only who wait for the rest.
    let early = pieces(&mut source, &what, false).unwrap();
    let mut bytes = Vec::new();
    early[0].write(&mut bytes).unwrap();
    let error = import(&mut cpu(&files), &bytes, &into(&what.model)).unwrap_err().to_string();
    assert!(error.contains("pages without the state"), "{error}");
}
