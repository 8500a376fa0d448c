//! Texts into tokens: the same under any block size and number of threads, and every error.

use std::path::{Path, PathBuf};

use super::super::super::scratch::Folder;
use super::super::{TokenFile, Tokens, Width};
use super::blocks::Blocks;
use super::{PrepareOptions, Prepared, ValidationDraw, prepare};

const END: u32 = 256;

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

fn options() -> PrepareOptions {
    PrepareOptions::new(257)
}

fn run(inputs: &[PathBuf], output: &Path, options: &PrepareOptions) -> crate::Result<Prepared> {
    prepare(inputs, output, &bytes, options, &mut |_, _| {})
}

fn read(path: &Path) -> Vec<u32> {
    let file = TokenFile::open(path, Width::U16).unwrap();
    let mut tokens = vec![0; file.len() as usize];
    file.copy(0, &mut tokens).unwrap();
    tokens
}

/// Documents of many lengths, some without text, with characters of up to four bytes.
fn documents() -> Vec<String> {
    (0..200).map(|i| "aé\n漢🦀".chars().cycle().skip(i).take(i * i % 97).collect()).collect()
}

#[test]
fn documents_are_encoded_whole_in_order_and_each_ends_in_its_token() {
    let (folder, documents) = (Folder::new(), documents());
    let text = documents.join("<|end|>");
    let input = folder.file("text", &text);
    let wanted: Vec<u32> =
        documents.iter().filter(|d| !d.is_empty()).flat_map(|d| [bytes(d), vec![END]].concat()).collect();
    let options = options().with_separator("<|end|>").with_end_of_text(END);
    for block in [1, 16, 100, 1000, 1 << 20] {
        for threads in [1, 4] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let output = folder.path("out.bin");
            let options = options.clone().with_block_bytes(block);
            let done = pool.install(|| run(std::slice::from_ref(&input), &output, &options)).unwrap();
            assert_eq!(read(&output), wanted, "blocks of {block} on {threads} threads");
            let documents = documents.iter().filter(|d| !d.is_empty()).count() as u64;
            assert_eq!(done, Prepared { documents, tokens: wanted.len() as u64, ..Prepared::default() });
        }
    }
}

#[test]
fn without_a_separator_each_file_is_a_document_cut_at_line_ends() {
    let folder = Folder::new();
    let inputs = [folder.file("a", "one\ntwo\nthree"), folder.file("b", ""), folder.file("c", "four\n")];
    let output = folder.path("out.bin");
    let seen = std::sync::Mutex::new(Vec::new());
    let encode = |text: &str| {
        seen.lock().unwrap().push(text.to_string());
        bytes(text)
    };
    let options = options().with_end_of_text(END).with_block_bytes(6);
    let done = prepare(&inputs, &output, &encode, &options, &mut |_, _| {}).unwrap();
    assert_eq!((done.documents, done.tokens), (2, 20));
    assert_eq!(read(&output), [bytes("one\ntwo\nthree"), vec![END], bytes("four\n"), vec![END]].concat());
    let mut seen = seen.into_inner().unwrap();
    seen.sort();
    assert_eq!(seen, ["four\n", "one\n", "three", "two\n"]);
}

#[test]
fn a_line_longer_than_any_block_is_cut_between_characters_and_the_document_goes_on() {
    let folder = Folder::new();
    let text = "漢字🦀é".repeat(100);
    let input = [folder.file("text", &text)];
    for separator in [None, Some("<|end|>")] {
        let blocks: Vec<_> = Blocks::new(&input, separator, 5).unwrap().take(1000).unwrap();
        assert!(blocks.len() > 5);
        assert!(blocks.iter().all(|block| block.text.len() <= 16 * 7), "memory is bounded");
        assert_eq!(blocks.iter().map(|block| block.text.as_str()).collect::<String>(), text);
        assert_eq!(blocks.iter().filter(|block| block.ends_document).count(), 1);
    }
    let options = options().with_end_of_text(END).with_block_bytes(5);
    let done = run(&input, &folder.path("out.bin"), &options).unwrap();
    assert_eq!((done.documents, done.tokens), (1, text.len() as u64 + 1));
    assert_eq!(read(&folder.path("out.bin")), [bytes(&text), vec![END]].concat());
}

#[test]
fn a_separator_is_found_wherever_blocks_are_cut() {
    let folder = Folder::new();
    for filler in 0..300 {
        let text = format!("{}<|end|>b\n<|end|>", "x".repeat(filler));
        let input = [folder.file("text", &text)];
        let options = options().with_separator("<|end|>").with_end_of_text(END).with_block_bytes(3);
        run(&input, &folder.path("out.bin"), &options).unwrap();
        let first = if filler == 0 { vec![] } else { [bytes(&"x".repeat(filler)), vec![END]].concat() };
        assert_eq!(read(&folder.path("out.bin")), [first, bytes("b\n"), vec![END]].concat(), "{filler}");
    }
}

#[test]
fn validation_has_its_share_of_the_documents_and_together_they_are_all() {
    let folder = Folder::new();
    let documents: Vec<String> = (0..400).map(|i| format!("document {i}")).collect();
    let input = [folder.file("text", documents.join("\n\n"))];
    let (training, validation) = (folder.path("train.bin"), folder.path("val.bin"));
    let options = options().with_separator("\n\n").with_end_of_text(END).with_validation(&validation, 0.1);
    let done = run(&input, &training, &options).unwrap();
    assert_eq!((done.documents, done.validation_documents), (360, 40));
    let of = |path: &Path| -> Vec<String> {
        let tokens = read(path);
        let text = |part: &[u32]| part.iter().map(|&byte| char::from(byte as u8)).collect();
        tokens.split(|&token| token == END).filter(|part| !part.is_empty()).map(text).collect()
    };
    let (train, val) = (of(&training), of(&validation));
    assert_eq!((train.len(), val.len()), (360, 40));
    assert_eq!(
        done.tokens + done.validation_tokens,
        (read(&training).len() + read(&validation).len()) as u64
    );
    let mut all = [train, val.clone()].concat();
    all.sort();
    let mut wanted = documents;
    wanted.sort();
    assert_eq!(all, wanted);
    run(&input, &training, &options.with_block_bytes(50)).unwrap();
    assert_eq!(of(&validation), val, "the same documents each time");
}

#[test]
fn progress_counts_the_bytes_of_all_files() {
    let folder = Folder::new();
    let inputs = [folder.file("a", "x\n".repeat(50)), folder.file("b", "y\n".repeat(20))];
    let mut told = Vec::new();
    let options = options().with_block_bytes(10);
    prepare(&inputs, folder.path("out.bin"), &bytes, &options, &mut |done, all| told.push((done, all)))
        .unwrap();
    assert!(told.len() > 5 && told.is_sorted() && told.iter().all(|&(_, all)| all == 140));
    assert_eq!(told.last(), Some(&(140, 140)));
}

#[test]
fn text_that_is_not_utf_8_is_an_error_with_its_place() {
    let folder = Folder::new();
    let mut text = "good\n".repeat(20).into_bytes();
    text.extend(b"bad \xff here\n");
    for block in [4, 64, 1000] {
        let options = options().with_block_bytes(block);
        let error =
            run(&[folder.file("text", &text)], &folder.path("out.bin"), &options).unwrap_err().to_string();
        assert!(error.contains("text: got bytes that are not UTF-8 at byte 104"), "{error}");
    }
    let continuation = [folder.file("text", [0x80; 2000])];
    let error =
        run(&continuation, &folder.path("out.bin"), &options().with_block_bytes(4)).unwrap_err().to_string();
    assert!(error.contains("at byte 0"), "{error}");
    let cut_off = [folder.file("text", &"é".as_bytes()[..1])];
    assert!(
        run(&cut_off, &folder.path("out.bin"), &options()).unwrap_err().to_string().contains("at byte 0")
    );
    assert_eq!(folder.names(), ["text"], "nothing is left of what failed");
}

#[test]
fn tokens_beyond_the_vocabulary_are_errors() {
    let folder = Folder::new();
    let input = [folder.file("text", "abc")];
    let error = run(&input, &folder.path("out.bin"), &PrepareOptions::new(99)).unwrap_err().to_string();
    assert!(
        error.contains("out.bin: got token 99 at position 2, wanted one of a vocabulary of 99"),
        "{error}"
    );
    let error = run(&input, &folder.path("out.bin"), &PrepareOptions::new(70_000)).unwrap_err().to_string();
    assert!(error.contains("got a vocabulary of 70000 tokens, wanted at most 65536"), "{error}");
    let wide = PrepareOptions::new(70_000).with_width(Width::U32);
    prepare(&input, folder.path("out.bin"), &|_| vec![69_999], &wide, &mut |_, _| {}).unwrap();
    assert_eq!(std::fs::read(folder.path("out.bin")).unwrap(), 69_999u32.to_le_bytes());
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let folder = Folder::new();
    let (input, output) = ([folder.file("text", "abc")], folder.path("out.bin"));
    let error = |inputs: &[PathBuf], output: &Path, options: PrepareOptions| {
        run(inputs, output, &options).unwrap_err().to_string()
    };
    assert!(error(&[], &output, options()).contains("got no files to read"));
    assert!(error(&input, &output, options().with_separator("")).contains("got an empty separator"));
    assert!(error(&input, &output, options().with_end_of_text(257)).contains("got token 257 as end of text"));
    for share in [0.0, 1.0, f64::NAN] {
        assert!(
            error(&input, &output, options().with_validation("v", share))
                .contains("got a validation share of")
        );
    }
    assert!(error(&input, &input[0], options()).contains("to read and to write"));
    assert!(
        error(&input, &output, options().with_validation(&output, 0.5))
            .contains("for training and for validation")
    );
    assert!(error(&[folder.path("none")], &output, options()).contains("none: "));
    assert!(error(&[folder.file("empty", "")], &output, options()).contains("got no tokens to write"));
}

#[test]
fn the_share_of_the_documents_is_drawn_within_one_of_any_number() {
    for share in [0.001, 0.1, 0.25, 0.3333, 0.5, 0.77, 0.999] {
        let draw = ValidationDraw::new(share);
        let mut drawn = 0;
        for document in 0..20_000u64 {
            drawn += u64::from(draw.has(document));
            let wanted = share * (document + 1) as f64;
            assert!((drawn as f64 - wanted).abs() <= 1.001, "{share}: {drawn} of {document}");
        }
    }
    let gaps: Vec<u64> = (0..1000).filter(|&d| ValidationDraw::new(0.1).has(d)).collect();
    assert!(gaps.windows(2).any(|pair| pair[1] - pair[0] != 10), "drawn at random");
}
