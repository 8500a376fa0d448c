//! Tokens in files, windows over them, and everything that can be wrong with a file.

use std::path::Path;

use phalanx_tensor::{Device, RngKey};

use super::{BLOCK, Blend, IndexedTokens, Packed, TokenFile, TokenWindows, Tokens, Width};
use crate::Result;
use crate::data::scratch::Folder;
use crate::data::{DataLoaderConfig, Dataset, Samples};

fn all(tokens: &impl Tokens) -> Vec<u32> {
    let mut to = vec![0; tokens.len() as usize];
    tokens.copy(0, &mut to).unwrap();
    to
}

fn values(tensor: &phalanx_tensor::Tensor) -> Vec<i64> {
    tensor.to_vec().unwrap()
}

/// A pair of files of these documents, each some sequences.
fn write_indexed(prefix: &Path, vocabulary: u32, documents: &[&[&[u32]]]) -> Result<u64> {
    IndexedTokens::write(prefix, vocabulary, |writer| {
        for document in documents {
            document.iter().try_for_each(|sequence| writer.sequence(sequence))?;
            writer.end_document();
        }
        Ok(())
    })
}

const DOCUMENTS: [&[&[u32]]; 3] = [&[&[1, 2], &[3]], &[&[4, 5, 6]], &[&[7], &[], &[8, 9]]];

#[test]
fn indexed_tokens_are_megatrons_bytes_and_read_back() {
    let folder = Folder::new();
    let prefix = folder.path("corpus.en");
    assert_eq!(write_indexed(&prefix, 100, &DOCUMENTS).unwrap(), 9);
    assert_eq!(folder.names(), ["corpus.en.bin", "corpus.en.idx"]);
    let mut wanted = b"MMIDIDX\0\0".to_vec();
    wanted.extend([1, 0, 0, 0, 0, 0, 0, 0, 8]);
    wanted.extend([6u64, 4].iter().flat_map(|n| n.to_le_bytes()));
    wanted.extend([2i32, 1, 3, 1, 0, 2].iter().flat_map(|n| n.to_le_bytes()));
    wanted.extend([0i64, 4, 6, 12, 14, 14].iter().flat_map(|n| n.to_le_bytes()));
    wanted.extend([0i64, 2, 3, 6].iter().flat_map(|n| n.to_le_bytes()));
    assert_eq!(std::fs::read(folder.path("corpus.en.idx")).unwrap(), wanted);
    for name in ["corpus.en", "corpus.en.bin", "corpus.en.idx"] {
        let tokens = IndexedTokens::open(folder.path(name)).unwrap();
        assert_eq!(all(&tokens), [1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(tokens.document_starts(0..9).unwrap(), [0, 3, 6]);
        assert_eq!(tokens.document_starts(3..6).unwrap(), [3]);
        assert_eq!(tokens.document_starts(4..6).unwrap(), [0u64; 0]);
        assert_eq!(
            (tokens.sequences(), tokens.sequence(2).unwrap(), tokens.sequence(5).unwrap()),
            (6, 3..6, 7..9)
        );
        assert!(tokens.sequence(6).unwrap_err().to_string().contains("got sequence 6, wanted one of 6"));
        assert!(tokens.document_starts(4..10).is_err());
    }
    // Larger vocabularies take four bytes.
    assert_eq!(write_indexed(&prefix, 100_000, &[&[&[99_999]]]).unwrap(), 1);
    assert_eq!(all(&IndexedTokens::open(&prefix).unwrap()), [99_999]);
    assert_eq!(std::fs::read(folder.path("corpus.en.bin")).unwrap(), 99_999i32.to_le_bytes());
}

#[test]
fn the_last_document_ends_where_the_tokens_do_and_no_document_is_empty() {
    let folder = Folder::new();
    let written = IndexedTokens::write(folder.path("c"), 100, |writer| {
        writer.end_document();
        writer.sequence(&[1, 2])?;
        writer.end_document();
        writer.end_document();
        assert_eq!((writer.len(), writer.is_empty()), (2, false));
        writer.sequence(&[3])
    });
    assert_eq!(written.unwrap(), 3);
    let idx = std::fs::read(folder.path("c.idx")).unwrap();
    let entries: Vec<u8> = [0i64, 1, 2].iter().flat_map(|n| n.to_le_bytes()).collect();
    assert!(idx.ends_with(&entries) && idx.len() == 34 + 2 * 12 + 24);
    assert_eq!(IndexedTokens::open(folder.path("c")).unwrap().document_starts(0..3).unwrap(), [0, 2]);
}

#[test]
fn the_documents_of_many_are_found() {
    let folder = Folder::new();
    let lengths: Vec<usize> = (0..2000).map(|i| i * 7 % 5 + usize::from(i % 3 == 0)).collect();
    let written = IndexedTokens::write(folder.path("many"), 10, |writer| {
        for &length in &lengths {
            writer.sequence(&vec![1; length])?;
            writer.end_document();
        }
        Ok(())
    });
    let tokens = IndexedTokens::open(folder.path("many")).unwrap();
    let mut wanted: Vec<u64> =
        lengths.iter().scan(0, |at, &n| Some(std::mem::replace(at, *at + n as u64))).collect();
    wanted.dedup();
    wanted.retain(|&start| start < written.as_ref().copied().unwrap());
    assert_eq!(tokens.document_starts(0..tokens.len()).unwrap(), wanted);
    for start in (0..tokens.len() - 40).step_by(13) {
        let inside: Vec<u64> = wanted.iter().copied().filter(|at| (start..start + 40).contains(at)).collect();
        assert_eq!(tokens.document_starts(start..start + 40).unwrap(), inside, "from {start}");
    }
}

#[test]
fn what_is_wrong_with_an_index_is_said() {
    let folder = Folder::new();
    let prefix = folder.path("c");
    write_indexed(&prefix, 100, &DOCUMENTS).unwrap();
    let (idx, bin) = (folder.path("c.idx"), folder.path("c.bin"));
    let good = std::fs::read(&idx).unwrap();
    let error = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = good.clone();
        change(&mut bytes);
        std::fs::write(&idx, bytes).unwrap();
        IndexedTokens::open(&prefix).unwrap_err().to_string()
    };
    assert!(error(&|b| b[0] = b'X').contains(r"got the magic `XMIDIDX\x00\x00`, wanted `MMIDIDX\x00\x00`"));
    assert!(error(&|b| b[9] = 2).contains("c.idx: got version 2, wanted 1"));
    assert!(error(&|b| b[17] = 7).contains("got tokens of type 7 (f32), wanted an integer"));
    assert!(error(&|b| b[17] = 0).contains("got tokens of type 0, wanted an integer"));
    assert!(error(&|b| b.truncate(20)).contains("got a truncated index of 20 bytes, wanted at least 34"));
    assert!(
        error(&|b| b.truncate(100))
            .contains("got a truncated index of 100 bytes, wanted 138 for 6 sequences and 4 entries")
    );
    assert!(error(&|b| b.push(0)).contains("got an index of 139 bytes, wanted 138"));
    assert!(error(&|b| b[18..26].fill(0xff)).contains("got a truncated index of 138 bytes"));
    assert!(error(&|b| b[34..38].fill(0xff)).contains("got sequence 0 of -1 tokens, wanted 0 or more"));
    assert!(
        error(&|b| b[34] = 3).contains("got sequence 1 at byte 4, wanted it at 6, where the one before ends")
    );
    assert!(error(&|b| b[106] = 1).contains("got 1 as entry 0 of the documents, wanted a sequence of 0..=0"));
    assert!(error(&|b| b[114] = 7).contains("got 7 as entry 1 of the documents, wanted a sequence of 0..=6"));
    assert!(error(&|b| b[122] = 1).contains("got 1 as entry 2 of the documents, wanted a sequence of 2..=6"));
    let sizes = error(&|b| b[34 + 20] = 3);
    assert!(
        sizes.contains("c.bin: got 18 bytes, wanted 20: ")
            && sizes.contains("6 sequences of 10 tokens in all"),
        "{sizes}"
    );
    assert!(error(&|b| b.clear()).contains("c.idx: got an empty file"));
    // An index with a byte for each sequence at its end, as those of several modalities have.
    let mut modes = good.clone();
    modes.extend([0; 6]);
    std::fs::write(&idx, modes).unwrap();
    assert_eq!(IndexedTokens::open(&prefix).unwrap().len(), 9);
    std::fs::write(&idx, good).unwrap();
    std::fs::write(&bin, b"").unwrap();
    assert!(IndexedTokens::open(&prefix).unwrap_err().to_string().contains("c.bin: got an empty file"));
    std::fs::remove_file(&bin).unwrap();
    assert!(IndexedTokens::open(&prefix).unwrap_err().to_string().contains("c.bin: "));
}

#[test]
fn indexed_numbers_that_are_no_tokens_are_errors_when_they_are_read() {
    let folder = Folder::new();
    let prefix = folder.path("c");
    write_indexed(&prefix, 70_000, &[&[&[1, 2, 3]]]).unwrap();
    let mut bytes = std::fs::read(folder.path("c.bin")).unwrap();
    bytes[4..8].fill(0xff);
    std::fs::write(folder.path("c.bin"), bytes).unwrap();
    let mut to = [0; 2];
    let tokens = IndexedTokens::open(&prefix).unwrap();
    assert!(tokens.copy(1, &mut to).unwrap_err().to_string().contains("got token -1 at position 1"));
    let tokens = tokens.with_vocabulary(3);
    assert!(
        tokens
            .copy(2, &mut to[..1])
            .unwrap_err()
            .to_string()
            .contains("got token 3 at position 2, wanted one of a vocabulary of 3")
    );
}

#[test]
fn a_failed_write_of_indexed_tokens_leaves_the_old_pair() {
    let folder = Folder::new();
    let prefix = folder.path("c");
    write_indexed(&prefix, 100, &DOCUMENTS).unwrap();
    assert!(
        write_indexed(&prefix, 100, &[&[&[100]]])
            .unwrap_err()
            .to_string()
            .contains("got token 100 at position 0")
    );
    assert!(write_indexed(&prefix, 100, &[]).unwrap_err().to_string().contains("got no tokens to write"));
    assert!(write_indexed(&prefix, 1 << 31, &[]).unwrap_err().to_string().contains("got no tokens"));
    assert!(
        write_indexed(&prefix, u32::MAX, &[])
            .unwrap_err()
            .to_string()
            .contains("got a vocabulary of 4294967295 tokens")
    );
    assert_eq!(IndexedTokens::open(&prefix).unwrap().len(), 9);
    assert_eq!(folder.names(), ["c.bin", "c.idx"]);
}

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

/// The loader of `nn`, as it draws: where sample `sample` begins.
fn start_in_nn(len: usize, context: usize, seed: u64, sample: u64) -> usize {
    let count = ((len - context) / context).max(1) as u64;
    let stream = RngKey { seed, step: 0 }.site(0x6461_7461);
    let (epoch, index) = (sample / count, sample % count);
    let half = (64 - (count - 1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1u64 << half) - 1;
    let mut place = index;
    loop {
        let (mut left, mut right) = (place >> half, place & mask);
        for round in 0..4 {
            let [word, ..] = stream.block(epoch, 1 + round + (right << 3));
            (left, right) = (right, left ^ (u64::from(word) & mask));
        }
        place = (left << half) | right;
        if place < count {
            break;
        }
    }
    let shifts = (len - context * count as usize) as u64;
    let [a, b, ..] = stream.block(epoch, 0);
    let shift = ((u64::from(a) << 32) | u64::from(b)) % shifts;
    shift as usize + place as usize * context
}

#[test]
fn windows_are_those_of_nn() {
    for (len, context, seed) in [(2, 1, 0), (10, 3, 7), (9, 8, 1), (1000, 7, 7), (5000, 4, 9)] {
        let tokens: Vec<u32> = (0..len as u32).collect();
        let windows = TokenWindows::new(tokens, context, seed).unwrap();
        for sample in 0..3 * windows.per_epoch() {
            let start = start_in_nn(len, context, seed, sample);
            assert_eq!(windows.start(sample), start as u64);
            let window = windows.sample(sample).unwrap();
            assert!(values(&window[0]).into_iter().eq(start as i64..(start + context) as i64));
            assert!(values(&window[1]).into_iter().eq(start as i64 + 1..(start + context) as i64 + 1));
        }
    }
}

#[test]
fn a_loader_of_windows_has_the_batches_of_nn_as_samples_and_as_a_data_set() {
    let windows = TokenWindows::new((0..500).collect::<Vec<u32>>(), 5, 7).unwrap();
    let config = DataLoaderConfig::new(6).with_workers(2);
    let mut drawn = config.clone().stream(windows.clone()).unwrap();
    let mut shuffled = config.train(windows, 7).unwrap();
    for step in 0..40 {
        let (a, b) = (drawn.next_step().unwrap(), shuffled.next_step().unwrap());
        assert_eq!(a[0].tensors[0].shape(), [6, 5]);
        for row in 0..6 {
            let start = start_in_nn(500, 5, 7, step * 6 + row as u64) as i64;
            let of = |t: usize| values(&a[0].tensors[t])[row * 5..row * 5 + 5].to_vec();
            assert!(of(0).into_iter().eq(start..start + 5) && of(1).into_iter().eq(start + 1..start + 6));
        }
        for t in 0..2 {
            assert_eq!(values(&a[0].tensors[t]), values(&b[0].tensors[t]), "step {step}");
        }
    }
}

#[test]
fn unshifted_windows_are_all_that_fit_from_the_first_token_on() {
    let windows = TokenWindows::new((0..11).collect::<Vec<u32>>(), 5, 3).unwrap().unshifted();
    let starts: Vec<i64> =
        (0..Dataset::len(&windows)).map(|i| values(&windows.item(i, 9).unwrap()[0])[0]).collect();
    assert_eq!(starts, [0, 5]);
    assert!(windows.item(2, 0).unwrap_err().to_string().contains("got item 2, wanted one of 2"));
}

#[test]
fn a_text_shorter_than_a_window_is_refused() {
    let error = TokenWindows::new(vec![1, 2, 3], 3, 0).unwrap_err().to_string();
    assert!(error.contains("got 3 tokens for a context of 3"), "{error}");
    assert!(TokenWindows::new(vec![], 1, 0).is_err() && TokenWindows::new(vec![1, 2], 0, 0).is_err());
}

#[test]
fn packed_windows_are_the_windows_with_documents_and_no_target_across_them() {
    let folder = Folder::new();
    write_indexed(&folder.path("c"), 100, &DOCUMENTS).unwrap();
    let open = || IndexedTokens::open(folder.path("c")).unwrap();
    let packed = Packed::new(open(), 4, 1).unwrap().unshifted();
    let read = |packed: &dyn Dataset, i| -> Vec<Vec<i64>> {
        packed.item(i, 0).unwrap().iter().map(values).collect()
    };
    // Documents begin at tokens 0, 3 and 6.
    assert_eq!(read(&packed, 0), [vec![1, 2, 3, 4], vec![2, 3, -100, 5], vec![0, 0, 0, 3]]);
    assert_eq!(read(&packed, 1), [vec![5, 6, 7, 8], vec![6, -100, 8, 9], vec![0, 0, 2, 2]]);
    let last = Packed::new(open(), 6, 1).unwrap().unshifted();
    assert_eq!(read(&last, 0)[1], [2, 3, -100, 5, 6, -100], "the last target is in another document too");
    // Ends of text are in the text, and are the last tokens of their documents.
    let joined = Packed::new(vec![1, 0, 2, 3, 0, 4, 5].with_end_of_text(0), 6, 1).unwrap().unshifted();
    assert_eq!(
        read(&joined, 0),
        [vec![1, 0, 2, 3, 0, 4], vec![0, -100, 3, 0, -100, 5], vec![0, 0, 2, 2, 2, 5]]
    );
    // Drawn as the windows are.
    let (packed, windows) = (Packed::new(open(), 2, 9).unwrap(), TokenWindows::new(open(), 2, 9).unwrap());
    for sample in 0..20 {
        assert_eq!(values(&packed.sample(sample).unwrap()[0]), values(&windows.sample(sample).unwrap()[0]));
        assert_eq!(Samples::name(&packed, sample), Samples::name(&windows, sample));
    }
}

#[test]
fn a_blend_of_windows_is_loaded_by_weight_and_the_same_under_any_workers() {
    let source = |first: u32, seed| -> Box<dyn Samples> {
        Box::new(TokenWindows::new((first..first + 1000).collect::<Vec<_>>(), 4, seed).unwrap())
    };
    let read = |workers: usize| -> Vec<i64> {
        let blend = Blend::new(vec![(source(0, 1), 3.0), (source(10_000, 2), 1.0)], 5).unwrap();
        let config = DataLoaderConfig::new(100).with_workers(workers).with_device(Device::CPU);
        let mut loader = config.stream(blend).unwrap();
        (0..10).flat_map(|_| values(&loader.next_step().unwrap()[0].tensors[0])).collect()
    };
    let drawn = read(0);
    assert_eq!(drawn.iter().filter(|&&token| token < 10_000).count(), 750 * 4);
    assert_eq!(read(3), drawn);
}

#[test]
fn documents_begin_after_an_end_of_text() {
    let tokens = vec![5, 6, 0, 7, 0, 0, 8, 0].with_end_of_text(0);
    assert_eq!(tokens.document_starts(0..8).unwrap(), [0, 3, 5, 6]);
    assert_eq!(tokens.document_starts(3..6).unwrap(), [3, 5]);
    assert_eq!(tokens.document_starts(1..3).unwrap(), [0u64; 0]);
    assert_eq!(tokens.document_starts(0..0).unwrap(), [0u64; 0]);
    assert_eq!(tokens.document_starts(0..1).unwrap(), [0]);
    assert_eq!(tokens.end_of_text(), Some(0));
    assert!(tokens.document_starts(7..9).unwrap_err().to_string().contains("got the tokens 7..9"));
}

#[test]
fn long_ranges_are_searched_block_by_block() {
    let mut tokens = vec![1; 3 * BLOCK];
    let ends = [0, BLOCK - 1, BLOCK, 2 * BLOCK + 5];
    ends.iter().for_each(|&end| tokens[end] = 0);
    let starts = tokens.with_end_of_text(0).document_starts(0..3 * BLOCK as u64).unwrap();
    let wanted: Vec<u64> = std::iter::once(0).chain(ends.iter().map(|&end| end as u64 + 1)).collect();
    assert_eq!(starts, wanted);
}
