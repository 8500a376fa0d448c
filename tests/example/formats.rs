//! The formats of `--data`: texts, token files of nanoGPT and Megatron, prepared folders, mixtures; and errors.

use std::fs::{self, File};

use phalanx::train::data::{IndexedTokens, Tokens};

use super::{Folder, SMALL, gpt, losses, text};

/// The losses of three steps.
fn train(folder: &Folder, args: &[&str]) -> Vec<String> {
    let metrics = folder.path("m.jsonl");
    let output = gpt(&[&SMALL[..], &["--steps", "3", "--metrics", &metrics], args].concat());
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    losses(&metrics)
}

fn refused(args: &[&str], named: &str) {
    let output = gpt(args);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), said.trim_end().lines().count()), (Some(2), 1), "{args:?}: {said}");
    assert!(said.contains(named), "{args:?}: wanted {named:?}: {said}");
}

/// The bytes of the text as tokens of so many bytes.
fn tokens<const N: usize>(encode: impl Fn(u8) -> [u8; N]) -> Vec<u8> {
    text().bytes().flat_map(encode).collect()
}

#[test]
fn token_files_train_like_the_text_that_they_are_of() {
    let folder = Folder::new("formats");
    let wanted = train(&folder, &["--data", &folder.file("text.txt", text())]);
    let narrow = folder.file("narrow.bin", tokens(|byte| u16::from(byte).to_le_bytes()));
    assert_eq!(train(&folder, &["--data", &narrow, "--vocabulary-size", "256"]), wanted);
    let wide = folder.file("wide.bin", tokens(|byte| u32::from(byte).to_le_bytes()));
    assert_eq!(
        train(&folder, &["--data", &wide, "--vocabulary-size", "256", "--token-width", "u32"]),
        wanted
    );
    let all: Vec<u32> = text().bytes().map(u32::from).collect();
    IndexedTokens::write(folder.0.join("pair"), 256, |writer| writer.sequence(&all)).expect("a pair");
    for name in ["pair.bin", "pair.idx", "pair"] {
        assert_eq!(
            train(&folder, &["--data", &folder.path(name), "--vocabulary-size", "256"]),
            wanted,
            "{name}"
        );
    }
    // A folder as nanoGPT's scripts leave it.
    fs::create_dir(folder.0.join("nano")).expect("a folder");
    for name in ["train.bin", "val.bin"] {
        fs::copy(&narrow, folder.0.join("nano").join(name)).expect("a copy");
    }
    let nano = folder.path("nano");
    let with_validation = ["--data", &nano, "--vocabulary-size", "256", "--validate-every", "2"];
    assert_eq!(train(&folder, &with_validation), wanted);
    assert!(fs::read_to_string(folder.path("m.jsonl")).expect("metrics").contains("validation_loss"));
    refused(
        &[&SMALL[..], &["--data", &nano, "--vocabulary-size", "256", "--validation", &narrow]].concat(),
        "--validation",
    );
}

#[test]
fn damaged_and_misread_token_files_are_refused() {
    let folder = Folder::new("misread");
    let all: Vec<u32> = text().bytes().map(u32::from).collect();
    IndexedTokens::write(folder.0.join("pair"), 256, |writer| writer.sequence(&all)).expect("a pair");
    let (bin, idx) = (folder.path("pair.bin"), folder.path("pair.idx"));
    let narrow = folder.file("narrow.bin", tokens(|byte| u16::from(byte).to_le_bytes()));
    let odd = folder.file("odd.bin", [1; 4001]);
    let case = |more: &[&str], named: &str| refused(&[&SMALL[..], more].concat(), named);
    case(&["--data", &narrow], "--vocabulary-size");
    case(&["--data", &narrow, "--vocabulary-size", "100"], "wanted one of a vocabulary of 100");
    case(&["--data", &odd, "--vocabulary-size", "256"], "wanted whole tokens of 2 bytes");
    case(
        &["--data", &narrow, "--vocabulary-size", "70000", "--token-width", "u16"],
        "does not fit tokens of two bytes",
    );
    case(&["--data", &narrow, "--vocabulary", "300"], "its tokens are made");
    case(&["--data", &narrow, "--vocabulary-size", "256", "--token-width", "u8"], "--token-width");
    let whole = fs::read(&idx).expect("an index");
    fs::write(&idx, &whole[..whole.len() - 3]).expect("write");
    case(&["--data", &bin, "--vocabulary-size", "256"], "truncated index");
    fs::write(&idx, [b"NOTMAGIC!", &whole[9..]].concat()).expect("write");
    case(&["--data", &bin, "--vocabulary-size", "256"], "magic");
    for weight in ["0", "-1", "nan", "inf"] {
        case(&["--data", &format!("{narrow}={weight}"), "--vocabulary-size", "256"], "weight");
    }
    // A text that does not fit into any machine's memory is not read.
    let large = folder.path("large.txt");
    if File::create(&large).and_then(|file| file.set_len(1 << 43)).is_ok() {
        case(&["--data", &large], "`prepare`");
    }
}

#[test]
fn several_texts_are_mixed_by_weight() {
    let folder = Folder::new("mixed");
    let (one, other) = (folder.file("one.txt", text()), folder.file("other.txt", text().replace('a', "Z")));
    let alone = train(&folder, &["--data", &one]);
    let mixed = train(&folder, &["--data", &one, "--data", &other]);
    assert_ne!(mixed, alone);
    assert_eq!(train(&folder, &["--data", &format!("{one}=2"), "--data", &format!("{other}=2")]), mixed);
    assert_ne!(train(&folder, &["--data", &format!("{one}=9"), "--data", &other]), mixed);
    // From a file, too.
    let file = folder.file("run.toml", format!("data = [{one:?}, {other:?}]"));
    assert_eq!(train(&folder, &["--config", &file]), mixed);
}

#[test]
fn documents_stay_apart_in_what_prepare_writes() {
    let folder = Folder::new("documents");
    let document = |i: usize| text()[i * 50..i * 50 + 40 + i].to_string();
    let data = folder.file("text.txt", (0..40).map(document).collect::<Vec<_>>().join("<|end|>"));
    let out = folder.path("tokens");
    let common = ["prepare", "--data", &data, "--out", &out, "--vocabulary", "260"];
    let done = gpt(&[&common[..], &["--separator", "<|end|>", "--validation-share", "0.1"]].concat());
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let starts = |name: &str| {
        let tokens = IndexedTokens::open(folder.0.join("tokens").join(name)).expect("a pair");
        tokens.document_starts(0..tokens.len()).expect("starts").len()
    };
    assert_eq!((starts("train.bin"), starts("validation.bin")), (36, 4));
    train(&folder, &["--data", &out, "--validate-every", "2"]);
    assert!(fs::read_to_string(folder.path("m.jsonl")).expect("metrics").contains("validation_loss"));
    // With --packed, attention stays inside documents, under every layout; other words of a row change other losses.
    let packed = train(&folder, &["--data", &out, "--packed"]);
    assert_ne!(packed, train(&folder, &["--data", &out]));
    for layout in
        [&["--dp", "2", "--zero", "3"][..], &["--pp", "2", "--micro-batches", "2", "--schedule", "1f1b"]]
    {
        let one = if layout[0] == "--pp" {
            &["--micro-batches", "2"][..]
        } else {
            &["--emulate-dp", "2", "--micro-batches", "2"]
        };
        let [one, many] =
            [one, layout].map(|more| train(&folder, &[&["--data", &out, "--packed"], more].concat()));
        assert_eq!(one, many, "{layout:?}");
    }
    refused(&[&SMALL[..], &["--data", &data, "--packed"]].concat(), "--packed wants documents");
    refused(&[&SMALL[..], &["--data", &data, "--end-of-text", "10"]].concat(), "goes with --packed");
    refused(&["profile", "--data", &data, "--device", "meta"], "a meta device");
    // A split that is not possible is an error before anything is written.
    for share in ["nan", "1.5", "-0.1"] {
        let more = ["--separator", "<|end|>", "--validation-share", share];
        refused(&[&common[..], &more].concat(), "validation share");
    }
    let fresh = folder.path("fresh");
    refused(
        &["prepare", "--data", &data, "--out", &fresh, "--validation-share", "0.1"],
        "separator of documents",
    );
    assert!(!folder.0.join("fresh/train.bin").exists());
}
