use pollster::block_on;
use proptest::prelude::*;

use super::*;
use crate::source::{Dir, LocalFuture};

/// Files in memory.
pub(super) struct Files(pub(super) Vec<(&'static str, Vec<u8>)>);

impl Source for Files {
    fn label(&self) -> String {
        "dir".into()
    }
    fn size<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Option<u64>>> {
        let size = self.0.iter().find(|f| f.0 == name).map(|f| f.1.len() as u64);
        Box::pin(std::future::ready(Ok(size)))
    }
    fn read<'a>(&'a self, name: &'a str, range: Range<u64>) -> LocalFuture<'a, Result<Bytes>> {
        let file = &self.0.iter().find(|f| f.0 == name).unwrap().1;
        let bytes = file.get(range.start as usize..range.end as usize).expect("only bytes of the file are asked for");
        Box::pin(std::future::ready(Ok(Bytes::from(bytes.to_vec()))))
    }
}

fn open(files: Vec<(&'static str, Vec<u8>)>) -> Result<Checkpoint> {
    block_on(Checkpoint::open(Arc::new(Files(files))))
}

fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes.extend((0..data).map(|i| i as u8));
    bytes
}

pub(super) fn message(result: Result<Checkpoint>) -> String {
    match result {
        Ok(_) => panic!("a damaged checkpoint was opened"),
        Err(e) => e.to_string(),
    }
}

#[test]
fn a_model_is_read_where_it_lies() {
    let dir = Dir::open(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/nemotron_h")).unwrap();
    let checkpoint = block_on(Checkpoint::open(Arc::new(dir))).unwrap();
    let names: Vec<&str> = checkpoint.names().collect();
    let embed = *names.iter().find(|n| n.contains("embed")).unwrap();
    let t = block_on(checkpoint.get_any(&["no.such.name", embed], &[320, 64])).unwrap();
    assert_eq!((t.dtype, t.bytes.len()), (DType::Bf16, 320 * 64 * 2));
    let whole =
        std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/nemotron_h/model.safetensors")).unwrap();
    let reference = safetensors::SafeTensors::deserialize(&whole).unwrap();
    assert_eq!(names.len(), reference.len());
    for name in names {
        let view = reference.tensor(name).unwrap();
        assert_eq!(checkpoint.info(name).unwrap().shape, view.shape());
        assert_eq!(&*block_on(checkpoint.read(name)).unwrap(), view.data(), "{name}");
    }
}

#[test]
fn offsets_need_no_alignment_and_sizes_of_one_do_not_count() {
    let header = r#"{"a":{"dtype":"BF16","shape":[3,1,1],"data_offsets":[1,7]},"__metadata__":{"format":"pt"},
        "pad":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    let checkpoint = open(vec![(SINGLE, file(header, 7))]).unwrap();
    let t = block_on(checkpoint.get("a", &[3, 1])).unwrap();
    assert_eq!((t.shape.as_slice(), &*t.bytes), (&[3, 1][..], &[1, 2, 3, 4, 5, 6][..]));
}

#[test]
fn a_tensor_beside_others_that_were_asked_for_is_noticed() {
    let names = ["a.bias", "a.b.weight", "a.weight", "draft.weight", "head"];
    let entries: Vec<_> = names
        .iter()
        .enumerate()
        .map(|(i, name)| format!(r#""{name}":{{"dtype":"F32","shape":[1],"data_offsets":[{},{}]}}"#, 4 * i, 4 * i + 4))
        .collect();
    let checkpoint = open(vec![(SINGLE, file(&format!("{{{}}}", entries.join(",")), 20))]).unwrap();
    assert!(checkpoint.passed_over().is_empty());
    block_on(checkpoint.get("a.weight", &[1])).unwrap();
    assert_eq!(checkpoint.passed_over(), ["a.bias"]);
    block_on(checkpoint.get("a.bias", &[1])).unwrap();
    assert!(checkpoint.passed_over().is_empty());
    assert_eq!(checkpoint.skipped().into_iter().collect::<Vec<_>>(), [("a.b", (1, 4)), ("draft", (1, 4))]);
}

#[test]
fn a_wrong_request_names_file_tensor_and_both_shapes() {
    let header = r#"{"a":{"dtype":"F16","shape":[2,3],"data_offsets":[0,12]},"q":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[12,16]},
        "new":{"dtype":"F3","shape":[4],"data_offsets":[16,17]}}"#;
    let checkpoint = open(vec![(SINGLE, file(header, 17))]).unwrap();
    let ask = |name, shape: &[usize]| block_on(checkpoint.get(name, shape)).unwrap_err().to_string();
    assert_eq!(
        ask("b", &[2]),
        "dir/model.safetensors: tensor `b` is missing; the weights are incomplete or of another model"
    );
    let shape = ask("a", &[3, 2]);
    assert!(shape.contains("`a` has shape [2, 3], but config.json asks for [3, 2]"), "{shape}");
    assert!(ask("q", &[4]).contains("`q` of dtype F8_E4M3 is not supported"));
    assert!(ask("new", &[4]).contains("`new` of dtype F3 is not supported"));
}

#[test]
fn lying_headers_are_refused_by_name() {
    let entry = |dtype: &str, shape: &str, offsets: &str| {
        file(&format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#), 16)
    };
    for (bytes, expected) in [
        (entry("F32", "[4]", "[0,16]")[..60].to_vec(), "the header claims"),
        (entry("F32", "[5]", "[0,20]"), "tensor `a` ends at byte"),
        (entry("F32", "[3]", "[0,16]"), "tensor `a` is F32 [3] but has 16 bytes"),
        (entry("F32", "[4294967296,4294967296]", "[0,0]"), "tensor `a` is F32"),
        (entry("F32", "[4611686018427387905]", "[0,4]"), "tensor `a` is F32"),
        (entry("F32", "[4]", "[16,0]"), "entry for tensor `a` is not valid"),
        (entry("F32", "[4]", "[18446744073709551600,18446744073709551615]"), "entry for tensor `a` is not valid"),
        (entry("F32", "[-4]", "[0,16]"), "entry for tensor `a` is not valid"),
        (entry("F32", "[4]", "[0]"), "entry for tensor `a` is not valid"),
        (file("[]", 0), "the safetensors header is not valid"),
        (file("{", 0), "the safetensors header is not valid"),
        (u64::MAX.to_le_bytes().to_vec(), "the header claims 18446744073709551615 bytes"),
        (vec![1, 2, 3], "not a safetensors file"),
        (Vec::new(), "not a safetensors file"),
    ] {
        let text = message(open(vec![(SINGLE, bytes)]));
        assert!(text.starts_with("dir/model.safetensors: ") && text.contains(expected), "{text}");
    }
    let overlap =
        r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}}"#;
    assert!(message(open(vec![(SINGLE, file(overlap, 7))])).contains("`a` and `b` overlap"));
}

/// Another reader could take another of the two, or find in the gaps what this one does not see.
#[test]
fn a_file_that_can_be_read_in_two_ways_is_refused() {
    let entry = |name: &str, start: u64, end: u64| {
        format!(r#""{name}":{{"dtype":"U8","shape":[{}],"data_offsets":[{start},{end}]}}"#, end - start)
    };
    for (entries, data, expected) in [
        (vec![entry("a", 0, 4), entry("a", 4, 8)], 8, Some("names tensor `a` twice")),
        (vec![entry("a", 0, 4), entry("a", 0, 4)], 4, Some("names tensor `a` twice")),
        (vec![entry("a", 1, 4)], 4, Some("1 bytes before tensor `a` belong to no tensor")),
        (vec![entry("a", 0, 4), entry("b", 6, 8)], 8, Some("2 bytes before tensor `b` belong to no tensor")),
        (vec![entry("a", 0, 4)], 9, Some("5 bytes at the end belong to no tensor")),
        (vec![], 3, Some("3 bytes at the end belong to no tensor")),
        (vec![entry("a", 0, 4), entry("e", 2, 2)], 4, Some("overlap")),
        (vec![entry("b", 2, 4), entry("e", 2, 2), entry("a", 0, 2), entry("z", 4, 4)], 4, None),
    ] {
        let result = open(vec![(SINGLE, file(&format!("{{{}}}", entries.join(",")), data))]);
        match expected {
            None => assert_eq!(result.unwrap().names().count(), entries.len()),
            Some(expected) => {
                let text = message(result);
                assert!(text.starts_with("dir/model.safetensors: ") && text.contains(expected), "{text}");
            }
        }
    }
    let twice = r#"{"a":{"dtype":"U8","dtype":"F32","shape":[4],"data_offsets":[0,4]}}"#;
    assert!(
        message(open(vec![(SINGLE, file(twice, 4))])).contains("entry for tensor `a` is not valid: duplicate field")
    );
    let index = br#"{"weight_map":{"a":"1.safetensors","a":"2.safetensors"}}"#;
    assert!(message(open(vec![(INDEX, index.to_vec())])).contains("`weight_map` names tensor `a` twice"));
}

#[test]
fn shards_are_found_through_the_index() {
    let one = file(r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, 4);
    let two = file(r#"{"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#, 4);
    let index = |map: &str| (INDEX, format!(r#"{{"metadata":{{}},"weight_map":{map}}}"#).into_bytes());
    let shards = |map: &str| vec![index(map), ("1.safetensors", one.clone()), ("2.safetensors", two.clone())];
    let checkpoint = open(shards(r#"{"a":"1.safetensors","b":"2.safetensors"}"#)).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(block_on(checkpoint.get("b", &[1])).unwrap().bytes.len(), 4);
    for (map, expected) in [
        (r#"{"a":"../1.safetensors"}"#, "not a plain file name"),
        (r#"{"a":"/1.safetensors"}"#, "not a plain file name"),
        (r#"{"a":7}"#, "not a file name"),
        (r#"{"a":"3.safetensors"}"#, "dir/3.safetensors: no such file"),
        (r#"{"a":"2.safetensors"}"#, "dir/2.safetensors: tensor `a` is missing"),
        ("3", "key `weight_map`"),
    ] {
        let text = message(open(shards(map)));
        assert!(text.contains(expected), "{text}");
    }
    let text = message(open(vec![("pytorch_model.bin", vec![])]));
    assert!(
        text.contains("neither model.safetensors nor") && text.contains("pytorch_model.bin has to be converted"),
        "{text}"
    );
}

#[test]
fn a_random_checkpoint_has_every_tensor() {
    let checkpoint = Checkpoint::random(3);
    assert_eq!(checkpoint.find(&["x.weight", "y.weight"]), Some("x.weight"));
    let t = block_on(checkpoint.get("x.weight", &[8, 4])).unwrap();
    assert_eq!((t.dtype, t.bytes.len()), (DType::Bf16, 64));
}

proptest! {
    /// Whatever happens to a file, opening and reading it ends in a tensor of the right size or in an error.
    #[test]
    fn damage_never_panics(cut in 0usize..400, flips in prop::collection::vec((0usize..400, any::<u8>()), 0..6)) {
        let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[3,2],"data_offsets":[0,12]},
            "model.layers.0.b":{"dtype":"F32","shape":[5],"data_offsets":[12,32]},"c":{"dtype":"F16","shape":[],"data_offsets":[32,34]}}"#;
        let mut bytes = file(header, 34);
        for (at, with) in flips {
            let at = at % bytes.len();
            bytes[at] = with;
        }
        // Half of the cases keep their full length.
        if cut < bytes.len() && cut % 2 == 0 {
            bytes.truncate(cut);
        }
        if let Ok(checkpoint) = open(vec![(SINGLE, bytes)]) {
            for name in checkpoint.names() {
                let shape = checkpoint.info(name).unwrap().shape.clone();
                if let Ok(t) = block_on(checkpoint.get(name, &shape)) {
                    prop_assert_eq!(t.bytes.len(), shape.iter().product::<usize>() * t.dtype.bytes());
                }
            }
        }
    }
}
