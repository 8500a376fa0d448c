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
    // The file is written at the start, and names no run to resume.
    let resumed = run(&["--config", &config, "--resume", &out, "--steps", "5"]);
    assert_eq!(resumed.len(), 1);
    let written = fs::read_to_string(&config).unwrap();
    assert!(!written.contains("resume") && written.contains("\nsteps = 5\n"), "{written}");
    // The printed configuration is such a file, too.
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
        ("width = \"abc\"", "--width is \"abc\", wanted a whole number"),
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

/// A prepared folder trains as its text does.
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
    let file = format!("{tokens}/train.bin");
    let whole = fs::read(&file).unwrap();
    fs::write(&file, &whole[..whole.len() - 1]).unwrap();
    let said = refused(&["train", "--data", &tokens]);
    assert!(said.contains("train.bin") && said.contains("wanted"), "{said}");
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

/// Every value is read back unchanged, whatever its form.
#[test]
fn what_is_printed_gives_the_same_values() {
    let folder = Folder::new("printed");
    let flags = [
        "--lr",
        ".01",
        "--lr-min",
        "5.",
        "--steps",
        "007",
        "--prompt",
        "1.50",
        "--seed",
        "18446744073709551615",
        "--data",
        "a b.txt",
        "--data",
        "c\"d=2",
        "--out",
        "true",
        "--lr-schedule",
        "one-cycle",
        "--lr-rise",
        "0.2",
        "--ema",
        "0.999",
        "--plateau-factor",
        "0.5",
        "--validate-every",
        "3",
        "--loss-scaling",
        "--dtype",
        "f16",
        "--validation-rows",
        "9",
        "--explodes-at",
        "7",
        "--on-divergence",
        "skip",
        "--divergence-limit",
        "3",
        "--workers",
        "0",
        "--prefetch",
        "4",
        "--virtual-stages",
        "3",
        "--schedule",
        "interleaved",
        "--pp",
        "2",
    ];
    let print = |args: &[&str]| {
        let output = gpt(&[&["train", "--print-config"], args].concat());
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let printed = print(&flags);
    for line in [
        "lr = 0.01",
        "lr-min = 5.0",
        "steps = 7",
        "prompt = \"1.50\"",
        "seed = \"18446744073709551615\"",
        "data = [\"a b.txt\", \"c\\\"d=2\"]",
        "out = \"true\"",
        "# patience =",
        "divergence-limit = 3",
    ] {
        assert!(printed.lines().any(|own| own == line), "{line}: {printed}");
    }
    let file = folder.file("run.toml", &printed);
    assert_eq!(print(&["--config", &file]), printed);
    // A later flag overrules the file, also where both could not be given together.
    let two = print(&["--config", &file, "--pp", "1", "--ranks", "4"]);
    assert!(two.contains("\nranks = 4\n"));
    assert!(refused(&["train", "--config", &file, "--config", &file]).contains("second --config"));
}

/// The best weights are kept. A run can resume from them, and `generate` can use them.
#[test]
fn the_best_checkpoint_is_resumed_and_generates() {
    let folder = Folder::new("best");
    let (data, out, metrics) = (folder.file("text.txt", text()), folder.path("run"), folder.path("m.jsonl"));
    let common = [&SMALL[..], &["--data", &data, "--validation", &data, "--metrics", &metrics]].concat();
    // The rate is so high that the loss rises.
    let flags = [
        "--steps",
        "6",
        "--lr",
        "0.5",
        "--warmup",
        "2",
        "--validate-every",
        "1",
        "--keep-best",
        "--out",
        &out,
    ];
    let first = gpt(&[&common[..], &flags].concat());
    assert!(first.status.success(), "{}", String::from_utf8_lossy(&first.stderr));
    let losses_at = |file: &str| fs::read(format!("{out}/{file}")).expect("a file");
    assert!(losses_at("model/model.safetensors") != losses_at("best-model/model.safetensors"));
    let generated = |flags: &[&str]| {
        let args = [&["generate", "--model", &out, "--prompt", "abc", "--tokens", "4"], flags].concat();
        let output = gpt(&args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    generated(&["--best"]);
    let one = generated(&[]);
    for ranks in [&["--tp", "2"][..], &["--pp", "2"], &["--tp", "2", "--pp", "2"]] {
        assert_eq!(generated(ranks), one, "{ranks:?}");
    }
    let best = format!("{out}/best");
    let resumed = gpt(&["train", "--config", &format!("{out}/config.toml"), "--resume", &best]);
    assert!(resumed.status.success(), "{}", String::from_utf8_lossy(&resumed.stderr));
    let lines = losses(&metrics).len();
    assert!((1..6).contains(&lines), "{lines} steps after the best one");
    // Ending with the best weights.
    let restored = folder.path("restored");
    let flags = [&flags[..9], &["--keep-best", "--restore-best", "--out", &restored]].concat();
    assert!(gpt(&[&common[..], &flags].concat()).status.success());
    let model = |name: &str| fs::read(format!("{restored}/{name}/model.safetensors")).expect("a file");
    assert!(model("model") == model("best-model"));
}

#[test]
fn runs_from_a_model_and_with_learned_tokens_go_on_from_their_own_files() {
    let folder = Folder::new("own-files");
    let (data, base) = (folder.file("text.txt", text()), folder.path("base"));
    let run = |args: &[&str]| {
        let output = gpt(&[&["train", "--quiet"], args].concat());
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    let small = [
        "--data",
        &data,
        "--layers",
        "1",
        "--heads",
        "2",
        "--width",
        "16",
        "--context",
        "16",
        "--batch",
        "4",
    ];
    run(&[&small[..], &["--vocabulary", "300", "--steps", "2", "--out", &base]].concat());
    run(&["--config", &format!("{base}/config.toml"), "--resume", &base, "--steps", "3"]);
    let (tuned, model) = (folder.path("tuned"), format!("{base}/model"));
    run(&[
        "--data",
        &data,
        "--context",
        "16",
        "--batch",
        "4",
        "--init",
        &model,
        "--steps",
        "2",
        "--out",
        &tuned,
    ]);
    run(&["--config", &format!("{tuned}/config.toml"), "--resume", &tuned, "--steps", "3"]);
    // Together they are refused, and so is another text.
    assert!(
        refused(&["train", "--init", &model, "--resume", &tuned])
            .contains("--init does not go with --resume")
    );
    let other = folder.file("other.txt", text().replace('a', "b"));
    let said = refused(&[
        "train",
        "--config",
        &format!("{base}/config.toml"),
        "--resume",
        &base,
        "--data",
        &other,
        "--steps",
        "9",
    ]);
    assert!(said.contains("the run began with"), "{said}");
}

#[test]
fn shapes_refuses_what_is_no_key() {
    for (args, named) in
        [(&["--dpp", "2"][..], "dp"), (&["--dp"], "no value"), (&["--steps", "x"], "steps"), (&["2"], "2")]
    {
        let output = super::example("shapes").args(args).output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{args:?}: {said}");
        assert!(said.contains(named), "{args:?}: {said}");
    }
}
