//! Conversations as `--data`, and `generate --chat`. `PHALANX_EXAMPLE_FEATURES=chat` builds the example with them; without them it says what is
//! missing.

use std::io::Write;
use std::process::{Output, Stdio};

use crate::{Folder, example, gpt, losses, text};

/// Four questions with their answers, many times.
fn talks() -> String {
    let pairs = [("red", "rot"), ("one", "eins"), ("dog", "Hund"), ("sun", "Sonne")];
    let line = |(question, answer): &(&str, &str)| {
        format!("{{\"prompt\": \"{question}\", \"completion\": \"{answer}\"}}\n")
    };
    pairs.iter().map(line).collect::<String>().repeat(8)
}

const TEMPLATE: &str = "{% for m in messages %}{{ m.role[:1] + m.content }}.\n{% endfor %}{% if add_generation_prompt %}a{% endif %}";

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A run on conversations, with the losses of its steps.
fn tuned(folder: &Folder, args: &[&str]) -> Vec<f64> {
    let (data, metrics) = (folder.path("talks.jsonl"), folder.path("metrics.jsonl"));
    let run =
        ["train", "--quiet", "--context", "16", "--batch", "8", "--lr", "1e-2", "--lr-schedule", "constant"];
    let output = gpt(&[&run[..], &["--data", &data, "--metrics", &metrics], args].concat());
    assert!(output.status.success(), "{args:?}: {}", said(&output));
    losses(&metrics).iter().map(|loss| loss.parse().expect("a number")).collect()
}

#[test]
fn conversations_are_learned_under_every_layout_and_a_chat_answers() {
    let folder = Folder::new("conversations");
    let (data, corpus, base) =
        (folder.file("talks.jsonl", talks()), folder.file("text.txt", text()), folder.path("base"));
    if !std::env::var("PHALANX_EXAMPLE_FEATURES").is_ok_and(|features| features.contains("chat")) {
        for args in [&["train", "--data", &data][..], &["generate", "--model", &base, "--chat"]] {
            let output = gpt(args);
            assert!(
                output.status.code() == Some(2) && said(&output).contains("`--features chat`"),
                "{}",
                said(&output)
            );
        }
        return;
    }
    let sizes = ["--architecture", "llama", "--layers", "2", "--heads", "2", "--width", "32"];
    let rest = ["train", "--quiet", "--context", "16", "--batch", "4", "--steps", "1", "--data", &corpus];
    let output = gpt(&[&rest[..], &sizes, &["--out", &base]].concat());
    assert!(output.status.success(), "{}", said(&output));
    let (model, out) = (format!("{base}/model"), folder.path("out"));
    let none = gpt(&["train", "--init", &model, "--data", &data]);
    assert!(said(&none).contains("got no chat template"), "{}", said(&none));
    folder.file("base/model/chat_template.jinja", TEMPLATE);

    let whole = tuned(&folder, &["--init", &model, "--steps", "60"]);
    let first = tuned(&folder, &["--init", &model, "--steps", "30", "--out", &out]);
    let rest = tuned(&folder, &["--resume", &out, "--steps", "60"]);
    assert_eq!([first, rest].concat(), whole);
    for layout in [
        &["--dp", "2", "--micro-batches", "2"][..],
        &["--pp", "2"],
        &["--tp", "2"],
        &["--dp", "2", "--zero", "3"],
    ] {
        let got = tuned(&folder, &[&["--init", &model, "--steps", "4"], layout].concat());
        let close = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-4;
        assert!(got.iter().zip(&whole).all(close), "{layout:?}: {got:?}, wanted {:?}", &whole[..4]);
    }

    let chat = ["generate", "--model", &out, "--chat", "--temperature", "0"];
    let one = gpt(&[&chat[..], &["--prompt", "dog"]].concat());
    assert_eq!(String::from_utf8_lossy(&one.stdout), "Hund\n", "{}", said(&one));
    let mut talk =
        example("gpt").args(chat).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
    talk.stdin.take().expect("a pipe").write_all(b"sun\n").expect("it reads");
    let talk = talk.wait_with_output().expect("it ends");
    assert_eq!((talk.status.code(), &*String::from_utf8_lossy(&talk.stdout)), (Some(0), "Sonne\n"));
}
