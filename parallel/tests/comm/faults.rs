//! One rank goes wrong; all must end, and say why.

use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use phalanx_parallel::comm::{Call, Error, Reduction};
use phalanx_parallel::launch::{Rank, Threads};
use phalanx_tensor::{DType, Tensor};

use crate::fuzz::stall;

type Result<T, E = Error> = std::result::Result<T, E>;

fn zeros(rank: &Rank, count: usize, dtype: DType) -> Result<Tensor> {
    Ok(Tensor::zeros(&[count], dtype, rank.device())?)
}

/// What the launcher says, and what each rank heard.
fn run(ranks: usize, timeout_ms: u64, f: impl Fn(&Rank) -> Result<()> + Sync) -> (String, Vec<String>) {
    let (heard, start) = (Mutex::new(vec![String::new(); ranks]), Instant::now());
    let outcome = Threads::new(ranks).timeout(Duration::from_millis(timeout_ms)).run(|rank| {
        let outcome = f(&rank);
        heard.lock().unwrap()[rank.rank()] = outcome.as_ref().map_or_else(Error::to_string, |()| "ok".into());
        outcome
    });
    assert!(start.elapsed() < Duration::from_secs(20), "took {:?}", start.elapsed());
    (outcome.unwrap_err().to_string(), heard.into_inner().unwrap())
}

#[test]
fn a_mismatch_is_an_error_on_every_rank_that_names_both_sides() {
    type Odd = fn(&Rank) -> Result<()>;
    let sum = |rank: &Rank, n, dtype| rank.comm().all_reduce(&mut zeros(rank, n, dtype)?, Reduction::Sum);
    let cases: [(Odd, &str); 4] = [
        (|r| r.comm().all_reduce(&mut zeros(r, 5, DType::F32)?, Reduction::Max), "all_reduce(max) of 5 f32"),
        (|r| r.comm().all_reduce(&mut zeros(r, 5, DType::F64)?, Reduction::Sum), "all_reduce(sum) of 5 f64"),
        (|r| r.comm().all_reduce(&mut zeros(r, 6, DType::F32)?, Reduction::Sum), "all_reduce(sum) of 6 f32"),
        (|r| r.comm().barrier(), "barrier"),
    ];
    for (odd, named) in cases {
        let (_, heard) = run(3, 5000, |rank| {
            rank.comm().barrier()?;
            if rank.rank() == 1 { odd(rank) } else { sum(rank, 5, DType::F32) }
        });
        for text in heard {
            assert!(text.contains(&format!("rank 1 {named} (call 1")), "{text}");
            assert!(text.contains("rank 0 all_reduce(sum) of 5 f32 (call 1"), "{text}");
        }
    }
}

#[test]
fn messages_that_do_not_fit_name_both_sides() {
    let (_, heard) = run(2, 5000, |rank| match rank.rank() {
        0 => rank.comm().send(&zeros(rank, 3, DType::F32)?, 1),
        _ => rank.comm().recv(&mut zeros(rank, 4, DType::F32)?, 0),
    });
    for text in heard {
        assert!(text.contains("rank 0 send of 3 f32") && text.contains("rank 1 recv of 4 f32"), "{text}");
    }
}

#[test]
fn a_rank_that_does_not_arrive_is_named() {
    let there = Barrier::new(2);
    let (said, heard) = run(3, 500, |rank| {
        match rank.rank() {
            2 => stall(rank.comm()),
            _ => drop(there.wait()),
        }
        rank.comm().barrier()
    });
    assert!(
        said.contains("barrier (call 0 of group [0, 1, 2]): ranks [2] did not arrive within 500 ms"),
        "{said}"
    );
    assert!(heard.iter().all(|text| text.contains("[2] did not arrive")), "{heard:?}");
}

#[test]
fn who_only_waits_for_the_late_one_is_not_blamed() {
    let there = Barrier::new(2);
    let (said, _) = run(3, 500, |rank| {
        let pair = |a, b| rank.comm().group(&[a, b]);
        match rank.rank() {
            // Waits longest, but for a rank that itself waits.
            0 => {
                let pending = pair(0, 1)?.start(Call::barrier());
                there.wait();
                pending.wait()
            }
            1 => {
                there.wait();
                pair(1, 2)?.barrier()?;
                pair(0, 1)?.barrier()
            }
            _ => {
                stall(rank.comm());
                pair(1, 2)?.barrier()
            }
        }
    });
    assert!(said.contains("ranks [2] did not arrive"), "{said}");
}

#[test]
fn a_circle_of_waits_ends() {
    let (said, _) = run(2, 100, |rank| {
        let (me, other) = (rank.rank(), 1 - rank.rank());
        rank.comm().send(&zeros(rank, 1, DType::F32)?, other)?;
        rank.comm().recv(&mut zeros(rank, me, DType::F32)?, other)
    });
    assert!(said.contains("did not arrive within 100 ms") && said.contains("send of 1 f32"), "{said}");
}

#[test]
fn a_rank_that_ends_early_is_named_at_once() {
    let (said, heard) = run(3, 60_000, |rank| if rank.rank() == 1 { Ok(()) } else { rank.comm().barrier() });
    assert!(
        said.contains("barrier (call 0 of group [0, 1, 2]): rank 1 has ended without arriving"),
        "{said}"
    );
    assert!(heard[0].contains("rank 1") && heard[2].contains("rank 1"), "{heard:?}");
}

#[test]
fn an_error_or_panic_reaches_all_with_its_cause_and_their_place() {
    let cause = |panic: bool| {
        run(3, 60_000, move |rank| {
            let pending = rank.comm().start(Call::all_reduce(zeros(rank, 2, DType::F32)?, Reduction::Sum));
            if rank.rank() == 2 {
                pending.wait()?;
                assert!(!panic, "the layer is broken");
                zeros(rank, 1, DType::F32)?.item::<f64>()?;
            }
            rank.comm().barrier()
        })
    };
    let (said, heard) = cause(true);
    assert!(said.starts_with("rank 2 failed: panicked at ") && said.contains("faults.rs:"), "{said}");
    assert!(said.contains("the layer is broken"), "{said}");
    for text in &heard[..2] {
        assert!(text.starts_with("barrier (call 1 of group [0, 1, 2]): rank 2 failed"), "{text}");
        assert!(text.contains("the layer is broken"), "{text}");
    }
    let (said, _) = cause(false);
    assert!(said.contains("rank 2 failed: item: ") || said.contains("rank 2 failed: to_vec: "), "{said}");
}

#[test]
fn a_storage_in_use_is_an_error_of_its_rank() {
    let (said, _) = run(2, 5000, |rank| {
        let x = zeros(rank, 2, DType::F32)?;
        // Only this rank's thread could release it, which waits in the collective.
        let _guard = if rank.rank() == 1 { Some(x.read::<f32>("test")?) } else { None };
        rank.comm().all_reduce(&mut x.clone(), Reduction::Sum)
    });
    assert!(said.contains("rank 1 failed: all_reduce: the tensor's storage is in use"), "{said}");
}
