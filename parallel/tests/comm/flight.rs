//! The flight recorder: runs that hang or fail in every way, over threads and over TCP, and what the reader says of their dumps.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use phalanx_parallel::comm::{Call, Error, Reduction};
use phalanx_parallel::flight::{Dumps, Findings, FlightRecorder, OPERATIONS_MAX, dump_all, explain};
use phalanx_parallel::launch::{Rank, Threads};
use phalanx_tensor::{DType, Device, Tensor};

use crate::processes::{LONG, run};

/// A folder of its own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("phalanx-flight-{}-{next}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const SOON: Duration = Duration::from_secs(2);

/// Runs `f`, which fails, on ranks over threads and on ranks over TCP. Returns what the reader says of each run.
fn told(size: usize, f: impl Fn(&Rank) -> Result<(), Error> + Sync) -> [String; 2] {
    let folders = [Folder::new(), Folder::new()];
    let with = |rank: Rank, folder: &Path| {
        rank.comm().flight_recorder().unwrap().set_folder(folder);
        // So that no rank fails before every rank knows its folder.
        rank.comm().barrier()?;
        f(&rank)
    };
    let error = Threads::new(size).timeout(SOON).run(|rank| with(rank, &folders[0].0)).unwrap_err();
    assert!(!error.to_string().contains("PHALANX_FLIGHT_DIR"), "there is a folder: {error}");
    for outcome in run(size, SOON, |rank| with(rank, &folders[1].0).map_err(|e| e.to_string())) {
        outcome.unwrap_err();
    }
    folders.each_ref().map(|folder| {
        let text = explain(&folder.0).unwrap();
        let svg = std::fs::read_to_string(folder.0.join("flight.svg")).unwrap();
        assert!(svg.ends_with("</svg>\n") && svg.contains(&format!("rank {}", size - 1)), "{svg}");
        text
    })
}

fn has(text: &str, wanted: &[&str]) {
    wanted.iter().for_each(|wanted| assert!(text.contains(wanted), "wanted {wanted:?} in\n{text}"));
}

fn zeros(n: usize) -> Tensor {
    Tensor::zeros(&[n], DType::F32, Device::CPU).unwrap()
}

/// Waits until the run has failed.
fn idle(rank: &Rank) -> Result<(), Error> {
    let begin = Instant::now();
    while rank.comm().failure().is_none() {
        assert!(begin.elapsed() < LONG);
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// `file:line` of a line of this file, by a word on it that no other line has.
fn site(word: &str) -> String {
    let lines: Vec<&str> = include_str!("flight.rs").lines().collect();
    let marked = format!("// {word}");
    let line = lines.iter().position(|line| line.ends_with(&marked)).unwrap() + 1;
    format!("parallel/tests/comm/flight.rs:{line}:")
}

#[test]
fn swapped_collectives_are_named_with_their_lines() {
    for text in told(2, |rank| match rank.rank() {
        0 => rank.comm().all_reduce(&mut zeros(4), Reduction::Sum).and_then(|()| rank.comm().barrier()), // swapped 0
        _ => rank.comm().barrier().and_then(|()| rank.comm().all_reduce(&mut zeros(4), Reduction::Sum)), // swapped 1
    }) {
        has(
            &text,
            &[
                "2 of 2 ranks have dumps",
                "first disagreement: call 1 of ranks [0, 1]: the ranks call different things",
                &format!("rank 0: all_reduce(sum) of 4 f32 [4] at {}", site("swapped 0")),
                &format!("rank 1: barrier at {}", site("swapped 1")),
                "last common call: call 0 of ranks [0, 1]: barrier",
            ],
        );
    }
}

#[test]
fn unequal_shapes_are_named() {
    for text in told(3, |rank| {
        let mut x = zeros(4 + rank.rank() / 2);
        rank.comm().all_reduce(&mut x, Reduction::Sum)
    }) {
        has(
            &text,
            &[
                "call 1 of ranks [0, 1, 2]: the ranks call different things",
                "rank 1: all_reduce(sum) of 4 f32 [4]",
                "rank 2: all_reduce(sum) of 5 f32 [5]",
            ],
        );
    }
}

#[test]
fn a_rank_that_never_calls_is_named_with_what_it_did_last() {
    for text in told(3, |rank| match rank.rank() {
        1 => rank.comm().group(&[1]).and_then(|alone| alone.barrier()).and_then(|()| idle(rank)),
        _ => rank.comm().run(Call::broadcast(zeros(7), 2)), // broadcast
    }) {
        has(
            &text,
            &[
                "first disagreement: call 1 of ranks [0, 1, 2]: not all ranks have come",
                &format!("rank 0: broadcast of 7 f32 [7] from rank 2 at {}", site("broadcast")),
                "rank 0 -> rank 1: broadcast",
                "rank 2 -> rank 1: broadcast",
                "rank 1 waits for none: has not come, and has no operation under way; its last was barrier",
                "did not arrive within 2000 ms",
            ],
        );
        assert!(!text.contains("deadlock"), "{text}");
    }
}

#[test]
fn ranks_that_wait_in_a_circle_are_a_deadlock() {
    for text in told(3, |rank| {
        let pairs = [[0, 1], [1, 2], [0, 2]].map(|pair| rank.comm().group(&pair).ok());
        let first = [0, 1, 2][rank.rank()];
        pairs[first].as_ref().unwrap().barrier()
    }) {
        has(
            &text,
            &["rank 0 -> rank 1", "rank 1 -> rank 2", "rank 2 -> rank 0", "a deadlock: 0 -> 1 -> 2 -> 0"],
        );
    }
}

#[test]
fn a_receive_without_a_send_is_named() {
    for text in told(2, |rank| match rank.rank() {
        0 => rank.comm().barrier(),
        _ => rank.comm().recv(&mut zeros(3), 0), // receive
    }) {
        has(
            &text,
            &[
                "message 0 from rank 0 to rank 1",
                &format!("recv of 3 f32 [3] from rank 0 at {}", site("receive")),
                "rank 1 -> rank 0: recv of 3 f32",
                "a deadlock: 0 -> 1 -> 0",
            ],
        );
    }
}

#[test]
fn a_send_that_meets_another_receive_is_named() {
    for text in told(2, |rank| match rank.rank() {
        0 => rank.comm().send(&zeros(2), 1).and_then(|()| idle(rank)),
        _ => rank.comm().recv(&mut zeros(3), 0),
    }) {
        has(
            &text,
            &[
                "first disagreement: message 0 from rank 0 to rank 1: the ranks call different things",
                "rank 0: send of 2 f32 [2] to rank 1",
                "rank 1: recv of 3 f32 [3] from rank 0",
            ],
        );
    }
}

#[test]
fn a_panic_dumps_too() {
    // By the process's recorder of rank 0, since a rank that panics before the other has called ends that call at once.
    let first = Mutex::new(None);
    let is_waiting = |recorder: &FlightRecorder| {
        let folder = recorder.dump("before the panic").unwrap();
        explain(&folder).unwrap().contains("rank 0 -> rank 1: barrier")
    };
    for text in told(2, |rank| match rank.rank() {
        0 => {
            *first.lock().unwrap() = rank.comm().flight_recorder().cloned();
            rank.comm().barrier()
        }
        _ => {
            let begin = Instant::now();
            while !first.lock().unwrap().as_ref().is_some_and(is_waiting) {
                assert!(begin.elapsed() < LONG, "rank 0 does not wait");
                std::thread::sleep(Duration::from_millis(1));
            }
            first.lock().unwrap().take();
            panic!("on purpose")
        }
    }) {
        has(&text, &["2 of 2 ranks have dumps", "panicked", "on purpose", "rank 0 -> rank 1: barrier"]);
    }
}

#[test]
fn a_request_after_a_failure_keeps_its_dumps() {
    for text in told(2, |rank| match rank.rank() {
        0 => {
            let failed = rank.comm().barrier();
            rank.comm().flight_recorder().unwrap().dump("too late");
            failed
        }
        _ => idle(rank).and_then(|()| rank.comm().barrier()),
    }) {
        has(&text, &["2 of 2 ranks have dumps", "did not arrive", "rank 0 -> rank 1: barrier"]);
        assert!(!text.contains("too late"), "{text}");
    }
}

/// Also when a thread of its own waits in a collective.
#[test]
fn a_healthy_run_dumps_on_request_and_goes_on() {
    let folder = Folder::new();
    let sums = Threads::new(2).run(|rank| {
        let comm = rank.comm();
        comm.flight_recorder().unwrap().set_folder(&folder.0);
        comm.flight_recorder().unwrap().set_step(41);
        for _ in 0..OPERATIONS_MAX {
            comm.barrier()?;
        }
        if rank.rank() == 0 {
            std::thread::sleep(Duration::from_millis(100));
            assert!(dump_all("asked for").contains(&folder.0));
        }
        let mut x = Tensor::from_slice(&[rank.rank() as f32 + 1.0], &[1], Device::CPU)?;
        comm.all_reduce(&mut x, Reduction::Sum)?;
        Ok::<_, Error>(x.to_vec::<f32>()?[0])
    });
    assert_eq!(sums.unwrap(), [3.0, 3.0]);
    let text = explain(&folder.0).unwrap();
    has(
        &text,
        &["asked for", "rank 1: all_reduce(sum) of 1 f32 [1] in step 41", "rank 1 -> rank 0: all_reduce"],
    );
    let dumps = Dumps::read(&folder.0).unwrap();
    // The collective under way is among the last.
    assert_eq!(dumps.by_rank[&1].entries.len(), OPERATIONS_MAX);
    assert_eq!(dumps.by_rank[&1].head.before, 1);
}

#[test]
fn damaged_cut_and_missing_dumps_are_named_and_the_others_read() {
    let folder = Folder::new();
    let failed = Threads::new(4).timeout(SOON).run(|rank| {
        rank.comm().flight_recorder().unwrap().set_folder(&folder.0);
        rank.comm().barrier()?;
        if rank.rank() == 3 { idle(&rank) } else { rank.comm().barrier() }
    });
    failed.unwrap_err();
    let file = |rank: usize| folder.0.join(format!("rank-{rank}.jsonl"));
    let whole = std::fs::read(file(0)).unwrap();
    // Cut anywhere, a dump is read up to there, or named.
    for length in 0..whole.len() {
        std::fs::write(file(0), &whole[..length]).unwrap();
        let dumps = Dumps::read(&folder.0).unwrap();
        let _ = Findings::of(&dumps).text();
        let head = whole.iter().position(|byte| *byte == b'\n').unwrap();
        assert_eq!(dumps.by_rank.contains_key(&0), length >= head, "{length} bytes");
    }
    std::fs::write(file(0), [&whole[..], b"{\"kind\": 3}\n\xff\n"].concat()).unwrap();
    std::fs::write(file(1), b"no dump").unwrap();
    std::fs::remove_file(file(3)).unwrap();
    let (head, entries) = std::str::from_utf8(&whole).unwrap().split_once('\n').unwrap();
    let mut head: serde_json::Value = serde_json::from_str(head).unwrap();
    (head["rank"], head["unix_us"]) = (2.into(), 1.0.into());
    std::fs::write(file(2), format!("{head}\n{entries}")).unwrap();
    std::fs::write(file(9), String::from_utf8_lossy(&whole).replace("\"version\":1", "\"version\":99"))
        .unwrap();
    std::fs::write(file(8), "{\"version\":1,\"ranks\":1000000000000}\n").unwrap();
    let text = explain(&folder.0).unwrap();
    has(
        &text,
        &[
            "rank-8.jsonl cannot be read: got 1000000000000 ranks, wanted at most 65535",
            "rank 0's dump has 2 damaged lines",
            "rank-1.jsonl cannot be read: its first line",
            "rank-9.jsonl cannot be read: got version 99 of the format, wanted 1 to 1",
            "rank 2's dump was written before the run began: left out",
            "no dump: ranks 1, 2, 3",
            "rank 0 -> ranks 1, 2, 3: barrier",
            "rank 3: has no dump",
        ],
    );
    let error = explain(&folder.0.join("nowhere")).unwrap_err().to_string();
    assert!(error.contains("nowhere"), "{error}");
}

#[test]
fn without_a_folder_the_error_says_how_to_get_dumps() {
    let never = Threads::new(2).timeout(SOON).run(|rank| match rank.rank() {
        0 => rank.comm().barrier(),
        _ => idle(&rank),
    });
    let error = never.unwrap_err().to_string();
    assert!(error.contains("with PHALANX_FLIGHT_DIR=DIR every rank writes its last calls there"), "{error}");
}

/// What a note costs: the calls of a rank alone, which move nothing.
#[test]
#[ignore = "prints a time"]
fn time_of_a_call() {
    Threads::new(1)
        .run(|rank| {
            let mut x = zeros(16);
            for _ in 0..3 {
                let begin = Instant::now();
                (0..20_000).try_for_each(|_| rank.comm().all_reduce(&mut x, Reduction::Sum))?;
                println!("{:.0} ns a call", begin.elapsed().as_secs_f64() * 1e9 / 20_000.0);
            }
            Ok::<_, Error>(())
        })
        .unwrap();
}
