//! Bad input to the example, of every kind: one line on stderr that names what is wrong, code 2, nothing left behind.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::{Folder, SMALL, gpt, text, train};

/// Asserts that the arguments are refused in one line that names `named`, and that nothing is written to `out`.
fn refused(what: &str, args: &[&str], named: &str, out: &str) {
    let output = gpt(args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{what}: {stderr}");
    assert_eq!(stderr.trim_end().lines().count(), 1, "{what}: {stderr}");
    assert!(stderr.contains(named) && !stderr.contains("panicked"), "{what}: wanted {named:?}: {stderr}");
    assert!(output.stdout.is_empty(), "{what}");
    assert!(!Path::new(out).exists(), "{what} leaves {out}");
}

#[test]
fn bad_arguments_and_texts_are_refused_by_name() {
    let folder = Folder::new("bad");
    let (good, empty, short) = (folder.file("t", text()), folder.file("e", ""), folder.file("s", "short"));
    let (out, here) = (folder.path("out"), folder.0.display().to_string());
    let cases: &[(&[&str], &str)] = &[
        (&["--data", "/nowhere/text"], "/nowhere/text"),
        (&["--data", &empty], &empty),
        (&["--data", &short], &short),
        (&["--data", &here], &here),
        (&["--context", "5000"], "--context"),
        (&["--heads", "3", "--width", "64"], "--heads 3"),
        (&["--steps", "0"], "--steps"),
        (&["--steps", "-3"], "--steps"),
        (&["--steps", "2.5"], "--steps"),
        (&["--lr", "nan"], "--lr"),
        (&["--lr", "inf"], "--lr"),
        (&["--lr", "-1"], "--lr"),
        (&["--clip", "-1"], "--clip"),
        (&["--weight-decay", "nan"], "--weight-decay"),
        (&["--dropout", "1.5"], "--dropout"),
        (&["--batch", "0"], "--batch"),
        (&["--seed", "-1"], "--seed"),
        (&["--threads", "-1"], "--threads"),
        (&["--threads", "99999999"], "--threads"),
        (&["--batch", "18446744073709551615"], "--batch"),
        (&["--layers", "18446744073709551615"], "--layers"),
        (&["--width", "4000000", "--heads", "1"], "--width"),
        (&["--batch", "4", "--micro-batches", "5"], "5 micro-batches"),
        (&["--batch", "4", "--emulate-dp", "3"], "--emulate-dp"),
        (&["--no-such-flag"], "--no-such-flag"),
        (&["--device", "gpu"], "gpu"),
        (&["--device", "cuda"], "cuda"),
        (&["--dtype", "f8"], "--dtype"),
        (&["--ranks", "3", "--batch", "4"], "dp 4 x tp 1 x pp 1"),
        (&["--ranks", "2", "--dp", "4"], "--ranks 2"),
        (&["--dp", "0"], "--dp is 0"),
        (&["--dp", "2", "--emulate-dp", "2"], "--emulate-dp"),
        (&["--tp", "3", "--heads", "4"], "dp 1 x tp 4 x pp 1"),
        (&["--tp", "2", "--sequence-parallel", "--context", "7"], "wanted a multiple of 2"),
        (&["--sequence-parallel"], "--tp 1"),
        (&["--ranks", "3", "--pp", "2"], "--dp 1, 2 ranks"),
        (&["--pp", "300"], "300 ranks"),
        (&["--device", "cuda", "--dp", "2"], "cuda"),
        (
            &["--pp", "2", "--schedule", "interleaved", "--virtual-stages", "18446744073709551615"],
            "stages a rank",
        ),
        (&["--schedule", "1f1b"], "--schedule 1f1b goes with --pp"),
        (&["--dp", "2", "--schedule", "zb-v"], "--schedule zb-v goes with --pp"),
        (&["--virtual-stages", "2"], "the schedule is 1f1b"),
        (&["--pp", "2", "--schedule", "zb-h1", "--virtual-stages", "2"], "the schedule is zb-h1"),
        (&["--pp", "2", "--schedule", "zb-v", "--virtual-stages", "3"], "zb-v always has 2"),
        (&["--schedule", "pipedream"], "--schedule pipedream goes with --pp"),
        (
            &["--pp", "2", "--schedule", "pipedream", "--dp", "2"],
            "--schedule pipedream has one replica: got --dp 2",
        ),
        (&["--pp", "2", "--schedule", "pipedream-2bw", "--micro-batches", "2", "--zero", "1"], "--zero 1"),
        (
            &["--pp", "2", "--schedule", "pipedream", "--micro-batches", "2"],
            "got --micro-batches 2, wanted 1",
        ),
        (&["--pp", "3", "--schedule", "pipedream-2bw", "--micro-batches", "2"], "as --pp 3, got 2"),
        (&["--pp", "2", "--schedule", "pipedream", "--device", "meta"], "--device meta"),
        (&["--zero", "4"], "--zero"),
        (&["--zero", "1", "--micro-batches", "2", "--emulate-dp", "2"], "--emulate-dp"),
        (&["--sequence-parallel"], "--sequence-parallel"),
        (&["--backend", "nccl"], "--backend nccl is between GPUs, got --device cpu"),
        (&["--backend", "nccl", "--device", "cuda", "--dp", "2"], "NCCL"),
        (&["--metrics", "/nowhere/m.jsonl"], "/nowhere/m.jsonl"),
        (&["--trace", &here], &here),
        (&["--resume", "/nowhere/run"], "/nowhere/run"),
        (&["--init", "/nowhere/model"], "/nowhere/model"),
        (&["--init", &here, "--resume", &here], "--resume"),
    ];
    for (more, named) in cases {
        let data: &[&str] = if more[0] == "--data" { &[] } else { &["--data", &good] };
        refused(&format!("{more:?}"), &[&["train", "--out", &out], data, more].concat(), named, &out);
    }
    for (args, named) in [
        (&["generate", "--model", "/nowhere/model", "--prompt", "x"][..], "/nowhere/model"),
        (&["generate", "--prompt", "x"], "--model"),
        (&["generate", "--model", &here, "--prompt", "x", "--temperature", "-1"], "--temperature"),
        (&["generate", "--model", &here, "--prompt", "x", "--tokens", "-1"], "--tokens"),
        (&["generate", "--model", &here, "--prompt", ""], "--prompt"),
        (&["teach"], "teach"),
    ] {
        refused(&format!("{args:?}"), args, named, &out);
    }
}

/// A safetensors file with another header, or other data.
fn edited(file: &[u8], edit: impl Fn(&mut Value, &mut Vec<u8>)) -> Vec<u8> {
    let (header, data) = parts(file);
    let (mut header, mut data): (Value, _) = (serde_json::from_slice(header).expect("JSON"), data.to_vec());
    edit(&mut header, &mut data);
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

fn parts(file: &[u8]) -> (&[u8], &[u8]) {
    let length = u64::from_le_bytes(file[..8].try_into().expect("8 bytes")) as usize;
    file[8..].split_at(length)
}

/// The file with its tensors' entries damaged in every way that has a name. `w` is a matrix in it.
fn damaged_headers(file: &[u8], w: &str) -> Vec<(&'static str, Vec<u8>)> {
    let entry = |key: &'static str, value: Value| {
        edited(file, |header, _| {
            header[w][key] = value.clone();
        })
    };
    let extra = |header: &mut Value, data: &mut Vec<u8>| {
        header["extra"] = json!({"dtype": "U8", "shape": [8], "data_offsets": [data.len(), data.len() + 8]});
        data.extend([0; 8]);
    };
    let header = |bytes: &[u8]| [&(bytes.len() as u64).to_le_bytes(), bytes, parts(file).1].concat();
    vec![
        ("overlapping offsets", entry("data_offsets", json!([0, 4]))),
        ("negative offsets", entry("data_offsets", json!([-8, 8]))),
        ("offsets beyond the end", entry("data_offsets", json!([0, u64::MAX]))),
        ("one offset", entry("data_offsets", json!([0]))),
        ("a huge shape", entry("shape", json!([1u64 << 40, 1u64 << 40]))),
        ("a negative shape", entry("shape", json!([-1, 16]))),
        ("another shape", edited(file, |h, _| h[w]["shape"].as_array_mut().expect("sizes").reverse())),
        ("no shape", entry("shape", Value::Null)),
        ("integers", entry("dtype", json!("I32"))),
        ("another size", entry("dtype", json!("F64"))),
        ("an unknown dtype", entry("dtype", json!("F7"))),
        ("no dtype", entry("dtype", json!(7))),
        ("a tensor less", edited(file, |h, _| drop(h.as_object_mut().expect("an object").remove(w)))),
        ("a tensor more", edited(file, extra)),
        ("bytes too many", edited(file, |_, data| data.extend([0; 8]))),
        ("a header that is no JSON", header(b"{{{{{{{{")),
        ("a header that is no object", header(b"[1, 2]  ")),
        ("a header that is no text", header(&[0xff; 8])),
        ("a header without end", [&[0xff; 8], &file[8..]].concat()),
        ("a header longer than the file", [&(1u64 << 26).to_le_bytes(), &file[8..]].concat()),
    ]
}

/// The file cut at many lengths.
fn cuts(file: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let begin = [0, 1, 7, 8, 9, 8 + parts(file).0.len()];
    let lengths = begin.into_iter().chain((1..25).map(|i| i * file.len() / 25)).chain([file.len() - 1]);
    lengths.map(|length| (length, &file[..length]))
}

/// The file with one bit flipped, at `count` places spread over its first `end` bytes.
fn flips(file: &[u8], end: usize, count: usize) -> impl Iterator<Item = (usize, Vec<u8>)> {
    (0..count).map(move |i| {
        let (at, mut bytes) = (i * end / count, file.to_vec());
        bytes[at] ^= 1 << (i % 8);
        (at, bytes)
    })
}

#[test]
fn a_damaged_checkpoint_is_named_and_refused() {
    let folder = Folder::new("damaged");
    let (run, out) = (folder.path("run"), folder.path("out"));
    train(&folder, "m", &["--steps", "2", "--out", &run]);
    let (path, data) = (format!("{run}/checkpoint"), folder.path("text.txt"));
    let args = [&SMALL[..], &["--data", &data, "--steps", "4", "--resume", &run, "--out", &out]].concat();
    let damaged = |name: &str, cases: Vec<(String, Vec<u8>)>| {
        let file = format!("{path}/{name}");
        let whole = fs::read(&file).expect("a file");
        for (what, bytes) in cases {
            fs::write(&file, bytes).expect("write");
            refused(&format!("{name}: {what}"), &args, &path, &out);
        }
        fs::write(&file, whole).expect("write");
    };
    let flipped = |file: &[u8], end: usize| -> Vec<(String, Vec<u8>)> {
        flips(file, end, 60).map(|(at, bytes)| (format!("a bit of byte {at}"), bytes)).collect()
    };
    let index = fs::read(format!("{path}/checkpoint.json")).expect("an index");
    let lengths = (0..30).map(|i| i * index.len() / 30).chain([index.len() - 1]);
    let cut = lengths.map(|n| (format!("cut at {n}"), index[..n].to_vec()));
    damaged("checkpoint.json", cut.chain(flipped(&index, index.len())).collect());
    let whole = fs::read(format!("{path}/rank-0.safetensors")).expect("a file");
    let headers = damaged_headers(&whole, "model.h.0.mlp.c_fc.weight");
    let mut cases: Vec<_> = headers.into_iter().map(|(what, bytes)| (what.to_string(), bytes)).collect();
    cases.extend(cuts(&whole).map(|(length, bytes)| (format!("cut at {length}"), bytes.to_vec())));
    cases.extend(flipped(&whole, parts(&whole).0.len()));
    cases.extend(flipped(&whole, whole.len()));
    damaged("rank-0.safetensors", cases);
    refused("another seed", &[&args[..], &["--seed", "2"]].concat(), &path, &out);
    assert!(gpt(&args).status.success(), "the whole one is taken");
}

#[test]
fn a_damaged_model_folder_is_named_and_refused() {
    let folder = Folder::new("folder");
    let (run, out) = (folder.path("run"), folder.path("out"));
    train(&folder, "m", &["--steps", "2", "--out", &run]);
    let (model, data) = (format!("{run}/model"), folder.path("text.txt"));
    let args = [&SMALL[..], &["--data", &data, "--steps", "1", "--init", &model, "--out", &out]].concat();
    let with = |name: &str, named: &str, cases: Vec<(String, Vec<u8>)>| {
        let path = format!("{model}/{name}");
        let sound = fs::read(&path).ok();
        for (what, bytes) in cases {
            fs::write(&path, bytes).expect("write");
            refused(&what, &args, &format!("{model}/{named}"), &out);
        }
        match sound {
            Some(sound) => fs::write(&path, sound).expect("write"),
            None => fs::remove_file(&path).expect("remove"),
        }
    };
    let weights = fs::read(format!("{model}/model.safetensors")).expect("the weights");
    let mut cases: Vec<(String, Vec<u8>)> = damaged_headers(&weights, "transformer.h.0.attn.c_attn.weight")
        .into_iter()
        .map(|(what, bytes)| (what.into(), bytes))
        .collect();
    cases.extend(cuts(&weights).map(|(length, bytes)| (format!("cut at {length}"), bytes.to_vec())));
    // Without a checksum, damage that makes another valid file cannot be told: free-form metadata, numbers.
    let (after, header) = (8 + r#"{"__metadata__":{"format":"pt"},"#.len(), 8 + parts(&weights).0.len());
    let flips = flips(&weights, header, 80).filter(|(at, _)| *at < 8 || *at >= after);
    cases.extend(flips.map(|(at, bytes)| (format!("a bit of byte {at}"), bytes)));
    with("model.safetensors", "model.safetensors", cases);

    let config: Value =
        serde_json::from_slice(&fs::read(format!("{model}/config.json")).expect("a config")).expect("JSON");
    let mut cases: Vec<(String, Vec<u8>)> = [&b""[..], b"[]", b"null", b"{", b"{}", b"\xff\xff"]
        .iter()
        .map(|bytes| (format!("a config of {bytes:?}"), bytes.to_vec()))
        .collect();
    for key in ["vocab_size", "n_positions", "n_layer", "n_head", "n_embd", "n_inner"] {
        for value in
            [json!(-1), json!(0), json!(1.5), json!(1u64 << 40), json!(u64::MAX), json!("x"), json!([])]
        {
            let mut config = config.clone();
            config[key] = value;
            cases.push((format!("{key}: {}", config[key]), config.to_string().into()));
        }
        let mut config = config.clone();
        config.as_object_mut().expect("an object").remove(key);
        // Without `n_inner` it is four times the width, as here.
        if key != "n_inner" {
            cases.push((format!("no {key}"), config.to_string().into()));
        }
    }
    for (key, value) in [
        ("model_type", json!("bert")),
        ("activation_function", json!("step")),
        ("attn_pdrop", json!(1.5)),
        ("embd_pdrop", json!(-1)),
        ("layer_norm_epsilon", json!(-1)),
        ("initializer_range", json!(1e308)),
        ("scale_attn_weights", json!("yes")),
    ] {
        let mut config = config.clone();
        config[key] = value;
        cases.push((format!("{key}: {}", config[key]), config.to_string().into()));
    }
    with("config.json", "", cases);

    let word_level = |vocabulary: Value| {
        let model = json!({"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"});
        json!({"version": "1.0", "model": model}).to_string().into_bytes()
    };
    let cases = [
        ("empty", vec![]),
        ("no tokenizer", b"{}".to_vec()),
        ("no JSON", b"{\"model\": ".to_vec()),
        ("a negative token", word_level(json!({"<unk>": -1}))),
        ("a token out of the vocabulary", word_level(json!({"<unk>": 70_000}))),
        ("no unknown token", word_level(json!({"a": 1}))),
        ("one token only", word_level(json!({"<unk>": 1}))),
    ];
    with("tokenizer.json", "tokenizer.json", cases.map(|(what, b)| (format!("tokenizer: {what}"), b)).into());
    assert!(gpt(&args).status.success(), "the whole one is taken");
}
