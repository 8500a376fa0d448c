//! Megatron's pairs of files.

use super::super::{IndexedTokens, Tokens};
use super::{DOCUMENTS, Folder, all, write_indexed};

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
