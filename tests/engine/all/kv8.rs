//! KV pages in 8 bits through engines on the CPU.

use std::io::Cursor;

use selkie_core::bundle::Reader;
use selkie_core::cpu::CpuBackend;
use selkie_core::engine::Request;
use selkie_core::format::Products;
use selkie_core::ranks::Ranks;
use selkie_core::state::Realm;

use crate::{
    bundle::{
        cpu, engine, export, first_turn, golden, identity, import, into, options, request, run as answer, values,
    },
    models::{TestModel, golden_models, micro_models},
    promise::{Drafts, Output, run, serve},
};

fn models(all: Vec<TestModel>) -> Vec<TestModel> {
    all.into_iter().filter(TestModel::has_pages).collect()
}

fn in_8_bits(all: Vec<TestModel>) -> Vec<TestModel> {
    models(all).into_iter().map(TestModel::in_8_bits).collect()
}

#[test]
fn the_promise_holds() {
    let [host, disk, _] = run(in_8_bits(micro_models()), 100, Drafts::None);
    assert!(host > 200 && disk > 20, "{host} tokens from host memory, {disk} from disk");
    run(in_8_bits(micro_models()), 40, Drafts::Given);
    let mut families = golden_models();
    families.retain(|model| {
        ["falcon_h1", "kimi_linear", "nemotron_h", "qwen3_5_text", "zamba2"].contains(&model.name.as_str())
    });
    assert_eq!(families.len(), 5);
    run(in_8_bits(families), 6, Drafts::None);
}

/// RMS error over RMS of the logits, up to the first token that differs.
fn error(exact: &Output, coded: &Output) -> f64 {
    let same = exact.0.iter().zip(&coded.0).take_while(|(a, b)| a == b).count() + 1;
    let all = exact.1.iter().zip(&coded.1).take(same).flat_map(|(a, b)| a.iter().zip(b.iter()));
    let square = |x: f32| f64::from(x) * f64::from(x);
    let (error, size) = all.fold((0.0, 0.0), |(e, s), (a, b)| (e + square(a - b), s + square(*a)));
    (error / size).sqrt()
}

#[test]
fn logits_are_close_to_those_of_exact_pages() {
    let mut worst: f64 = 0.0;
    for model in models(golden_models()) {
        let name = model.name.clone();
        let exact = serve(&model);
        let error = error(&exact, &serve(&model.in_8_bits()));
        println!("{name}: {error:.1e}");
        assert!(error > 0.0, "{name}: nothing was rounded");
        worst = worst.max(error);
    }
    // That of zamba2_blocks is 2.2e-2.
    assert!(worst < 0.03, "{worst}");
}

#[test]
fn pages_in_8_bits_go_out_and_in() {
    ["falcon_h1", "kimi_linear"].into_iter().for_each(out_and_in);
}

fn out_and_in(folder: &str) {
    let files = golden(folder);
    let model = identity(&files);
    let coded = || engine(CpuBackend::new().kv8(true), &files, &options());
    let (bytes, second) = first_turn(&mut coded(), &model, 3);
    let want = answer(&mut coded(), &request(&second, 20)).0;

    let mut fresh = coded();
    let imported = import(&mut fresh, &bytes, &into(&model)).unwrap();
    assert_eq!((imported.tokens, imported.origin.as_str()), (192, ""));
    assert_eq!(export(&fresh, &model, &second[..202], Realm::default()).0, bytes);
    assert!(answer(&mut fresh, &request(&second, 20)).0 == want, "the continuation");

    // Other pages have other numerics, so values are converted, there and back again.
    let mut plain = cpu(&files);
    let there = import(&mut plain, &bytes, &into(&model)).unwrap();
    assert!(there.origin.contains("kv=I8"), "{}", there.origin);
    let (_, report) = answer(&mut plain, &Request { origin: there.origin.clone(), ..request(&second, 4) });
    assert_eq!((report.reused, report.converted), (192, true));
    let decoded = export(&plain, &model, &second[..202], Realm { origin: there.origin, ..Realm::default() }).0;
    let mut back = coded();
    let imported = import(&mut back, &decoded, &into(&model)).unwrap();
    let again = export(&back, &model, &second[..202], Realm { origin: imported.origin, ..Realm::default() }).0;
    let (first, decoded, again) = (values(&bytes), values(&decoded), values(&again));
    assert_eq!(first, decoded, "f32 holds what codes stand for");
    let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-6 * a.abs();
    assert!(decoded.iter().zip(&again).all(near), "their codes are the same");
}

#[test]
fn pages_in_8_bits_are_divided_with_their_scales() {
    ["falcon_h1", "kimi_linear"].into_iter().for_each(divided);
}

/// Latents are the same on all ranks.
fn divided(folder: &str) {
    let files = golden(folder);
    let model = identity(&files);
    let several = || engine(Ranks::open(2, Products::default()).unwrap().kv8(true), &files, &options());
    let (bytes, second) = first_turn(&mut several(), &model, 3);
    let want = answer(&mut several(), &request(&second, 20)).0;
    let mut fresh = several();
    assert_eq!(import(&mut fresh, &bytes, &into(&model)).unwrap().origin, "");
    assert!(answer(&mut fresh, &request(&second, 20)).0 == want, "the continuation");
    let mut one = engine(CpuBackend::new().kv8(true), &files, &options());
    let origin = import(&mut one, &bytes, &into(&model)).unwrap().origin;
    let again = export(&one, &model, &second[..202], Realm { origin, ..Realm::default() }).0;
    let (a, b) = (Reader::open(Cursor::new(&*bytes), "a").unwrap(), Reader::open(Cursor::new(&*again), "b").unwrap());
    assert_eq!(a.head().parts, b.head().parts);
}
