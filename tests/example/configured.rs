//! Runs that begin with a file: of flags, or of tokens that `prepare` has made.

use std::fs;

use super::{Folder, SMALL, gpt, losses, text};

/// The error of a run that is refused, in one line, with code 2.
fn refused(args: &[&str]) -> String {
    let output = gpt(args);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{args:?}: {said}");
    said
}

#[test]
fn a_run_is_repeated_from_the_file_that_it_writes_and_flags_win_over_the_file() {
    let folder = Folder::new("configured");
    let (data, out, metrics) = (folder.file("text.txt", text()), folder.path("run"), folder.path("m.jsonl"));
    let run = |more: &[&str]| {
        let output = gpt(&[&["train", "--metrics", &metrics], more].concat());
        assert!(output.status.success(), "{more:?}: {}", String::from_utf8_lossy(&output.stderr));
        losses(&metrics)
    };
    let flags = [&SMALL[1..], &["--data", &data, "--steps", "4", "--seed", "9", "--out", &out]].concat();
    let first = run(&flags);
    let config = format!("{out}/config.toml");
    assert_eq!(run(&["--config", &config, "--out", &folder.path("again")]), first);
    let shorter = run(&["--config", &config, "--out", &folder.path("shorter"), "--steps", "2"]);
    assert_eq!(shorter[..1], first[..1]);
    assert_eq!(shorter.len(), 2);
    // What is printed is such a file, too.
    let printed = gpt(&["train", "--config", &config, "--width", "32", "--quiet=false", "--print-config"]);
    let printed = String::from_utf8(printed.stdout).unwrap();
    for line in ["width = 32", "quiet = false", "seed = 9", "layers = 2"] {
        assert!(printed.lines().any(|own| own == line), "{line}: {printed}");
    }
}

#[test]
fn a_file_of_flags_that_cannot_be_is_named_with_the_nearest_key() {
    let folder = Folder::new("misconfigured");
    for (text, wanted) in [
        ("widht = 64", "there is no key \"widht\"; the nearest is \"width\""),
        ("config = \"x\"", "there is no key \"config\""),
        ("width = [1]", "width has the type array"),
        ("width = \"abc\"", "invalid value 'abc'"),
        ("width =", "TOML parse error"),
    ] {
        let file = folder.file("run.toml", text);
        let said = refused(&["train", "--config", &file]);
        assert!(said.contains(wanted), "{text}: {said}");
    }
    assert!(refused(&["train", "--config", "/nowhere/run.toml"]).contains("/nowhere/run.toml"));
    assert!(
        refused(&["train", "--validate-every", "2", "--data", &folder.file("t", text())])
            .contains("--validation")
    );
}

/// What was cut into tokens beforehand trains as the text does.
#[test]
fn a_prepared_folder_trains_like_its_text() {
    let folder = Folder::new("prepared");
    let (data, tokens) = (folder.file("text.txt", text()), folder.path("tokens"));
    let prepared = gpt(&["prepare", "--data", &data, "--out", &tokens, "--vocabulary", "300"]);
    assert!(prepared.status.success(), "{}", String::from_utf8_lossy(&prepared.stderr));
    let run = |data: &str, more: &[&str]| {
        let metrics = folder.path("m.jsonl");
        let flags = [&SMALL[..], &["--steps", "3", "--data", data, "--metrics", &metrics], more].concat();
        let output = gpt(&flags);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        losses(&metrics)
    };
    assert_eq!(run(&tokens, &[]), run(&data, &["--vocabulary", "300"]));
    // Its tokens are made; half a token is no token; a token beyond the vocabulary is named.
    assert!(refused(&["train", "--data", &tokens, "--vocabulary", "300"]).contains("its tokens are made"));
    assert!(refused(&["train", "--data", &tokens, "--validation", &data]).contains("--validation"));
    let file = format!("{tokens}/train.bin");
    let whole = fs::read(&file).unwrap();
    fs::write(&file, &whole[..whole.len() - 1]).unwrap();
    assert!(refused(&["train", "--data", &tokens]).contains("wanted whole tokens of 2 bytes"));
    fs::write(&file, vec![0xff; whole.len()]).unwrap();
    let said = refused(&["train", "--data", &tokens, "--quiet"]);
    assert!(said.contains("65535") && said.contains("train.bin"), "{said}");
    assert!(refused(&["prepare", "--data", "/nowhere/t", "--out", &tokens]).contains("/nowhere/t"));
    assert!(
        refused(&["prepare", "--data", &data, "--out", &tokens, "--vocabulary", "7"]).contains("wanted 256")
    );
    let odd = folder.file("odd.txt", [b'a', 0xff, b'b']);
    let said = refused(&["prepare", "--data", &odd, "--out", &folder.path("odd")]);
    assert!(said.contains("odd.txt") && said.contains("UTF-8"), "{said}");
}
