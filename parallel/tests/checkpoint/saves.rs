//! When a checkpoint is there: after a save, while one is under way, after one that was killed or failed. What all ranks hold is
//! written by all of them, each a share of a large tensor. The f32 values of a bf16 model are read from master copies or shards.

use phalanx_nn::autograd::ContextMode;
use std::fs;
use std::time::Duration;

use phalanx_nn::{BatchNormConfig, Buffer, Module, Parameters, Scope};
use phalanx_parallel::checkpoint::{BLOCK, Checkpoint, Saver, Trained};
use phalanx_parallel::data_parallel::DataParallel;
use phalanx_parallel::sharded::{Zero, ZeroConfig, ZeroStage};
use phalanx_parallel::sharded_tensor::ShardedTensor;
use phalanx_parallel::{Result, checkpoint, launch};
use phalanx_tensor::{Context, DType, Device, Tensor};

use crate::gpt::bytes;
use crate::{Place, gpt, save, settings};

fn filled(value: f64, n: usize) -> Tensor {
    phalanx_kernels::full(&[n], value, DType::F32, Device::CPU).unwrap()
}

fn step(saved: &Checkpoint) -> &str {
    &saved.settings()["step"]
}

#[test]
fn each_save_replaces_the_one_before() {
    let place = Place::new("replace");
    let folder = place.join("run/deeper/saved");
    let run = |rank: launch::Rank| -> Result<()> {
        let mut saver = Saver::new(rank.comm())?;
        let mut w = filled(0.0, 1000);
        for number in 1..4 {
            saver.wait()?;
            phalanx_kernels::fill_(&mut w, number as f64)?;
            saver.save(&folder, vec![ShardedTensor::whole("w", w.clone())], &settings(number))?;
        }
        // Another follows at once, and one is left to the end.
        saver.save(&folder, vec![ShardedTensor::whole("w", w.clone())], &settings(4))
    };
    launch::threads(3, run).unwrap();
    let saved = Checkpoint::open(&folder).unwrap();
    assert_eq!(step(&saved), "4");
    let part = ShardedTensor::whole("w", filled(0.0, 1000));
    saved.read(std::slice::from_ref(&part)).unwrap();
    assert_eq!(part.values.to_vec::<f32>().unwrap(), [3.0; 1000]);
    let beside: Vec<_> = fs::read_dir(folder.parent().unwrap()).unwrap().collect();
    assert_eq!(beside.len(), 1, "{beside:?}");
}

#[test]
fn what_a_killed_save_leaves_is_no_checkpoint_and_the_next_removes_it() {
    let place = Place::new("killed");
    let (folder, half) = (place.join("saved"), place.join(".saved.saving"));
    let part = || vec![ShardedTensor::whole("w", filled(1.0, 100))];
    let write = |number| {
        launch::threads(2, |rank| save(&rank, &folder, part(), &settings(number))).unwrap();
    };
    let leave = || {
        fs::create_dir_all(&half).unwrap();
        fs::write(half.join("rank-0.safetensors"), "half of it").unwrap();
    };
    leave();
    let refused = Checkpoint::open(&folder).err().unwrap().to_string();
    assert!(refused.contains("checkpoint.json"), "{refused}");
    write(1);
    leave();
    assert_eq!(step(&Checkpoint::open(&folder).unwrap()), "1");
    write(2);
    assert!(!half.exists());
    // Killed between the two renames: the old one is found, by the next save too.
    fs::rename(&folder, place.join(".saved.old")).unwrap();
    leave();
    assert_eq!(step(&Checkpoint::open(&folder).unwrap()), "2");
    write(3);
    assert_eq!(step(&Checkpoint::open(&folder).unwrap()), "3");
    assert!(!place.join(".saved.old").exists());
    // Killed before the old one was removed.
    fs::create_dir(place.join(".saved.old")).unwrap();
    fs::write(place.join(".saved.old/checkpoint.json"), "old").unwrap();
    assert_eq!(step(&Checkpoint::open(&folder).unwrap()), "3");
    write(4);
    assert!(!place.join(".saved.old").exists());
}

#[test]
fn a_folder_that_has_the_name_of_a_half_save_keeps_the_files_of_others() {
    let place = Place::new("foreign");
    let (folder, half) = (place.join("saved"), place.join(".saved.saving"));
    fs::create_dir_all(&half).unwrap();
    fs::write(half.join("rank-0.safetensors"), "half of it").unwrap();
    fs::write(half.join("notes.txt"), "mine").unwrap();
    let part = || vec![ShardedTensor::whole("w", filled(1.0, 100))];
    let write = || launch::threads(2, |rank| save(&rank, &folder, part(), &settings(1)));
    let error = write().unwrap_err().to_string();
    assert!(error.contains(".saved.saving") && error.contains("\"notes.txt\""), "{error}");
    assert_eq!(fs::read_to_string(half.join("notes.txt")).unwrap(), "mine");
    fs::remove_file(half.join("notes.txt")).unwrap();
    write().unwrap();
}

#[test]
#[cfg(unix)]
fn an_index_that_is_a_pipe_is_refused_and_not_waited_for() {
    let place = Place::new("pipe");
    let folder = place.join("saved");
    fs::create_dir_all(&folder).unwrap();
    let made = std::process::Command::new("mkfifo").arg(folder.join("checkpoint.json")).status();
    assert!(made.is_ok_and(|status| status.success()));
    let error = Checkpoint::open(&folder).unwrap_err().to_string();
    assert!(error.contains("checkpoint.json: this is no file"), "{error}");
}

#[test]
fn a_tensor_that_is_written_meanwhile_is_an_error_on_every_rank() {
    let place = Place::new("written");
    let folder = place.join("saved");
    let run = |rank: launch::Rank| -> Result<String> {
        let mut saver = Saver::new(rank.comm())?;
        let mut w = filled(rank.rank() as f64, 2000);
        let parts = vec![ShardedTensor::whole(format!("w{}", rank.rank()), w.clone())];
        save(&rank, &folder, parts.clone(), &settings(1))?;
        // Nothing is written before the last rank has come, which is after the tensor was written.
        if rank.rank() != 2 {
            saver.save(&folder, parts.clone(), &settings(2))?;
        }
        if rank.rank() == 1 {
            phalanx_kernels::fill_(&mut w, 9.0)?;
        }
        rank.comm().barrier()?;
        if rank.rank() == 2 {
            saver.save(&folder, parts, &settings(2))?;
        }
        Ok(saver.wait().unwrap_err().to_string())
    };
    for error in launch::threads(3, run).unwrap() {
        assert!(error.contains("rank 1") && error.contains("w1") && error.contains("written"), "{error}");
    }
    assert_eq!(step(&Checkpoint::open(&folder).unwrap()), "1");
    assert!(!place.join(".saved.saving").exists());
}

#[test]
fn a_tensor_may_be_written_once_a_save_has_released_it() {
    let place = Place::new("released");
    for memory in [0, 1 << 30] {
        let folder = place.join(&format!("saved-{memory}"));
        let run = |rank: launch::Rank| -> Result<()> {
            let mut saver = Saver::new(rank.comm())?.with_memory(memory).with_block(4096)?;
            let mut w = filled(1.0, 100_000);
            saver.save(&folder, vec![ShardedTensor::whole("w", w.clone())], &settings(1))?;
            saver.release()?;
            phalanx_kernels::fill_(&mut w, 9.0)?;
            saver.wait()?;
            let read = ShardedTensor::whole("w", filled(0.0, 100_000));
            Checkpoint::open(&folder)?.read(std::slice::from_ref(&read))?;
            assert!(read.values.to_vec::<f32>()?.iter().all(|value| *value == 1.0));
            // Nothing is left to release.
            saver.release()
        };
        launch::threads(2, run).unwrap();
    }
}

#[test]
fn buffers_are_those_of_the_first_rank_when_the_save_began() {
    let place = Place::new("buffers");
    let folder = place.join("saved");
    let run = |rank: launch::Rank| -> Result<()> {
        let norm = BatchNormConfig::new(3).init_1d(&Scope::new(1, DType::F32, rank.device()))?;
        let _train = Context::with(|c| c.set_train(true));
        let pass = || {
            let x =
                filled(2.0 + rank.rank() as f64, 6).with_shape(&[2, 3])?.to_device(rank.device(), false)?;
            norm.forward(&phalanx_nn::autograd::Var::new(x))
        };
        pass()?;
        let mut saver = Saver::new(rank.comm())?;
        saver.save(&folder, ShardedTensor::all_of(&norm), &settings(1))?;
        for _ in 0..5 {
            pass()?;
        }
        saver.wait()
    };
    launch::threads(2, run).unwrap();
    let norm = BatchNormConfig::new(3).init_1d(&Scope::new(1, DType::F32, Device::CPU)).unwrap();
    Checkpoint::open(&folder).unwrap().read(&ShardedTensor::all_of(&norm)).unwrap();
    let mut means = Vec::new();
    norm.visit("", &mut |path, entry| {
        if path == "running_mean" {
            means = entry.tensor().to_vec::<f32>().unwrap();
        }
    });
    assert_eq!(means, [0.2; 3], "a tenth of the first rank's mean");
    let plain = Buffer::new(filled(1.0, 2));
    assert!(ShardedTensor::of_buffer("b", &plain).buffer);
}

#[test]
fn a_rank_that_fails_while_others_save_ends_all_with_its_cause() {
    let place = Place::new("fails");
    for panics in [false, true] {
        let run = |rank: launch::Rank| -> Result<()> {
            let mut saver = Saver::new(rank.comm())?.with_block(8)?;
            let w = ShardedTensor::whole(format!("w{}", rank.rank()), filled(1.0, 300_000));
            saver.save(place.join("saved"), vec![w], &settings(1))?;
            if rank.rank() == 1 {
                assert!(!panics, "the panic of rank 1");
                return Err(phalanx_parallel::Error::Config("the error of rank 1".into()));
            }
            saver.wait()?;
            rank.comm().barrier()?;
            Ok(())
        };
        let ended = launch::Threads::new(3).timeout(Duration::from_secs(20)).run(run);
        let error = ended.unwrap_err().to_string();
        assert!(error.contains("of rank 1"), "{error}");
    }
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let place = Place::new("missing");
    let run = |rank: launch::Rank| -> Result<()> {
        let mut saver = Saver::new(rank.comm())?;
        if rank.rank() == 2 {
            return Ok(());
        }
        saver.save(place.join("saved"), vec![ShardedTensor::whole("w", filled(1.0, 3))], &settings(1))?;
        saver.wait()
    };
    let ended = launch::Threads::new(3).timeout(Duration::from_secs(20)).run(run);
    assert!(ended.unwrap_err().to_string().contains("rank 2"));
}

#[test]
fn what_cannot_be_saved_is_refused_on_every_rank() {
    let place = Place::new("refused");
    type Make = fn(usize) -> ShardedTensor;
    let cases: [(Make, &str); 5] = [
        (
            |rank| ShardedTensor { range: 0..rank + 3, ..ShardedTensor::whole("w", filled(1.0, 4)) },
            "part of w",
        ),
        (|rank| ShardedTensor::whole("w", filled(1.0, 3 + rank)), "rank 0 has f32 [3], rank 1 f32 [4]"),
        (
            |_| ShardedTensor {
                range: 0..2,
                ..ShardedTensor { values: filled(1.0, 2), ..ShardedTensor::whole("w", filled(1.0, 3)) }
            },
            "2 of 3",
        ),
        (|_| ShardedTensor::whole("w", Tensor::zeros(&[2], DType::F32, Device::Meta(0)).unwrap()), "on meta"),
        (|_| ShardedTensor::whole("w", filled(1.0, 6).slice(0, 0, 6, 2).unwrap()), "contiguous"),
    ];
    for (part, says) in cases {
        let run = |rank: launch::Rank| -> Result<String> {
            let mut saver = Saver::new(rank.comm())?;
            saver.save(place.join("saved"), vec![part(rank.rank())], &settings(1))?;
            Ok(saver.wait().unwrap_err().to_string())
        };
        for error in launch::threads(2, run).unwrap() {
            assert!(error.contains(says), "{error}");
        }
    }
    let run = |rank: launch::Rank| -> Result<()> {
        let folder = place.join(&format!("saved-{}", rank.rank()));
        save(&rank, &folder, vec![ShardedTensor::whole("w", filled(1.0, 3))], &settings(1))
    };
    assert!(launch::threads(2, run).unwrap_err().to_string().contains("saved-1"));
}

fn table(elements: usize, device: Device) -> Tensor {
    let values: Vec<f32> = (0..elements).map(|i| (i % 8191) as f32).collect();
    Tensor::from_slice(&values, &[elements], device).unwrap()
}

#[test]
fn a_table_larger_than_all_else_is_shared_out() {
    let (place, elements) = (Place::new("copies"), 3 * BLOCK / size_of::<f32>() + 12);
    let folder = place.join("saved");
    let saved = launch::threads(3, |rank| -> Result<()> {
        let parts = vec![
            ShardedTensor::whole("table", table(elements, rank.device())),
            ShardedTensor::whole("small", table(5, rank.device())),
        ];
        let mut saver = Saver::new(rank.comm())?;
        saver.save(&folder, parts, &settings(1))?;
        saver.wait()
    });
    saved.unwrap();
    for rank in 0..3 {
        let bytes = fs::metadata(folder.join(format!("rank-{rank}.safetensors"))).unwrap().len() as usize;
        assert!((BLOCK..BLOCK + 1000).contains(&bytes), "rank {rank} has written {bytes}");
    }
    let read = ShardedTensor::whole(
        "table",
        Tensor::zeros(&[elements], phalanx_tensor::DType::F32, Device::CPU).unwrap(),
    );
    let saved = Checkpoint::open(&folder).unwrap();
    saved.verify().unwrap();
    saved.read(std::slice::from_ref(&read)).unwrap();
    assert!(read.values.to_bytes().unwrap() == table(elements, Device::CPU).to_bytes().unwrap());
}

type State = Vec<(String, Vec<u8>)>;

/// Two steps over two ranks, from and to a checkpoint: the optimizer's whole state, masters included.
fn train(wide: bool, from: Option<&str>, to: Option<&str>, place: &Place) -> State {
    let run = |rank: launch::Rank| -> Result<State> {
        let model = gpt::model(DType::BF16, rank.device());
        let shard_dtype = wide.then_some(DType::F32);
        let grad_dtype = Some(DType::F32);
        let config = ZeroConfig { shard_dtype, grad_dtype, ..ZeroConfig::new(ZeroStage::Parameters) };
        let zero = Zero::new(&model, rank.comm().clone(), config)?;
        let mut optimizer = gpt::optimizer(zero.parameters());
        let trained = [Trained::new(&model, &zero)];
        if let Some(from) = from {
            Checkpoint::open(place.join(from))?.restore(rank.comm(), &trained, &mut [&mut optimizer])?;
        }
        let begin = if from.is_some() { 2 } else { 0 };
        for step in begin..begin + 2 {
            zero.backward(&gpt::loss(&model, step, gpt::rows(2, rank.rank(), 1).remove(0))?)?;
            gpt::update(&mut optimizer, DataParallel::grad_norm(&zero)?)?;
            zero.updated()?;
        }
        if let Some(to) = to {
            save(&rank, &place.join(to), checkpoint::parts(&trained, &[&optimizer])?, &settings(2))?;
        }
        let mut state = bytes(&zero.full_optimizer_state(optimizer.state_dict()?, &optimizer.kinds())?);
        state.sort();
        Ok(state)
    };
    launch::threads(2, run).unwrap().swap_remove(0)
}

#[test]
fn shares_in_f32_and_master_copies_are_read_from_each_other() {
    let place = Place::new("precision");
    assert!(train(true, None, Some("wide"), &place) == train(false, None, Some("narrow"), &place));
    let wanted = train(true, Some("wide"), None, &place);
    for (wide, from) in [(true, "narrow"), (false, "wide"), (false, "narrow")] {
        assert!(train(wide, Some(from), None, &place) == wanted, "wide {wide}, from {from}");
    }
}

#[test]
fn nothing_is_rounded_where_the_bits_would_be_lost() {
    let place = Place::new("rounded");
    train(true, None, Some("wide"), &place);
    let run = |rank: launch::Rank| -> Result<String> {
        let model = gpt::model(DType::BF16, rank.device());
        let share = phalanx_parallel::data_parallel::SingleDevice::new(&model);
        phalanx_nn::note_ranks(2); // as a rank that holds nothing
        let mut optimizer = phalanx_nn::Rule::init(phalanx_nn::Sgd::default(), vec![])?;
        let trained = [Trained::new(&model, &share)];
        let saved = Checkpoint::open(place.join("wide"))?;
        Ok(saved.restore(rank.comm(), &trained, &mut [&mut optimizer]).unwrap_err().to_string())
    };
    let error = launch::threads(1, run).unwrap().remove(0);
    assert!(error.contains("saved as f32, wanted bf16"), "{error}");
}
