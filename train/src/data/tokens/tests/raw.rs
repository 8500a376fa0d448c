//! Files of nothing but tokens.

use super::super::super::DataLoaderConfig;
use super::super::{Packed, TokenFile, TokenWindows, Tokens, Width};
use super::{Folder, all};

#[test]
fn a_token_file_is_little_endian_without_a_header_and_reads_back() {
    let folder = Folder::new();
    for (width, bytes) in [(Width::U16, 2), (Width::U32, 4)] {
        let path = folder.path("tokens.bin");
        let tokens: Vec<u32> = (0..100_000u32).map(|i| i * 7919 % 50_257).collect();
        let written = TokenFile::write(&path, width, 50_257, |writer| {
            tokens.chunks(999).try_for_each(|part| writer.push(part))?;
            assert_eq!((writer.len(), writer.is_empty()), (100_000, false));
            Ok(())
        });
        assert_eq!(written.unwrap(), 100_000);
        let raw = std::fs::read(&path).unwrap();
        assert_eq!((raw.len(), &raw[bytes..bytes + 2]), (100_000 * bytes, &7919u16.to_le_bytes()[..]));
        let file = TokenFile::open(&path, width).unwrap().with_vocabulary(50_257);
        assert_eq!(all(&file), tokens);
        let mut part = [0; 3];
        file.copy(99_997, &mut part).unwrap();
        assert_eq!(part, tokens[99_997..]);
        assert_eq!(
            (file.document_starts(0..9).unwrap(), file.document_starts(1..9).unwrap()),
            (vec![0], vec![])
        );
        let error = file.copy(99_998, &mut part).unwrap_err().to_string();
        assert!(error.ends_with("got the tokens 99998..100001, wanted a range of 100000 tokens"), "{error}");
        assert!(file.copy(u64::MAX, &mut part).is_err());
    }
}

#[test]
fn what_is_wrong_with_a_token_file_is_said() {
    let folder = Folder::new();
    let error =
        |bytes: &[u8], width| TokenFile::open(folder.file("t.bin", bytes), width).unwrap_err().to_string();
    assert!(error(&[], Width::U16).ends_with("t.bin: got an empty file, wanted data"));
    assert!(error(&[1; 5], Width::U16).ends_with("got 5 bytes, wanted whole tokens of 2 bytes"));
    assert!(error(&[1; 6], Width::U32).ends_with("got 6 bytes, wanted whole tokens of 4 bytes"));
    let bytes: Vec<u8> = [5u16, 6, 700, 800].iter().flat_map(|t| t.to_le_bytes()).collect();
    let file = TokenFile::open(folder.file("t.bin", bytes), Width::U16).unwrap().with_vocabulary(700);
    let mut to = [0; 3];
    let error = file.copy(1, &mut to).unwrap_err().to_string();
    assert!(
        error.ends_with("t.bin: got token 700 at position 2, wanted one of a vocabulary of 700"),
        "{error}"
    );
    // A loader names the window too.
    let windows = TokenWindows::new(file, 2, 0).unwrap();
    let error = DataLoaderConfig::new(1)
        .with_workers(0)
        .stream(windows)
        .unwrap()
        .next_step()
        .unwrap_err()
        .to_string();
    assert!(error.starts_with("sample 0, the window at token ") && error.contains("position 2"), "{error}");
}

#[test]
fn what_cannot_be_written_is_refused_and_leaves_the_old_file() {
    let folder = Folder::new();
    let path = folder.file("t.bin", [1, 0]);
    let write = |vocabulary, tokens: &[u32]| {
        TokenFile::write(&path, Width::U16, vocabulary, |writer| writer.push(tokens)).unwrap_err().to_string()
    };
    let error = write(65_537, &[1]);
    assert!(error.contains("got a vocabulary of 65537 tokens, wanted at most 65536"), "{error}");
    assert!(error.contains("`Width::U32`"));
    assert!(write(10, &[1, 2, 10]).ends_with("got token 10 at position 2, wanted one of a vocabulary of 10"));
    assert!(write(10, &[]).ends_with("got no tokens to write, wanted at least one"));
    assert_eq!((std::fs::read(&path).unwrap(), folder.names()), (vec![1, 0], vec!["t.bin".to_string()]));
}

/// A field of `/proc/self/status`, in KiB.
#[cfg(target_os = "linux")]
fn memory(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[cfg(target_os = "linux")]
#[test]
fn a_file_of_4_gib_takes_little_memory_to_open_and_sample() {
    use std::os::unix::fs::MetadataExt;
    const BYTES: u64 = 4 << 30;
    let folder = Folder::new();
    let path = folder.path("sparse.bin");
    let file = std::fs::File::create(&path).unwrap();
    if let Err(why) = file.set_len(BYTES) {
        eprintln!("skipped: no file of 4 GiB here: {why}");
        return;
    }
    if file.metadata().unwrap().blocks() * 512 > BYTES / 64 {
        eprintln!("skipped: the file system has no sparse files");
        return;
    }
    let before = (memory("VmRSS"), memory("VmHWM"));
    let tokens = TokenFile::open(&path, Width::U16).unwrap().with_end_of_text(1);
    let windows = Packed::new(tokens, 1024, 5).unwrap();
    assert_eq!(windows.windows().per_epoch(), BYTES / 2 / 1024 - 1);
    let mut loader = DataLoaderConfig::new(256).with_workers(2).stream(windows).unwrap();
    for _ in 0..20 {
        assert_eq!(loader.next_step().unwrap()[0].tensors[0].shape(), [256, 1024]);
    }
    let grown = (memory("VmRSS").saturating_sub(before.0), memory("VmHWM") - before.1);
    assert!(grown.0 < 128 << 10 && grown.1 < 128 << 10, "grew by {grown:?} KiB");
}
