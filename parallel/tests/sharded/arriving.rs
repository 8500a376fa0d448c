//! ZeRO-1 and 2: `updated` returns while the values are on their way, and no reader of any kind sees the old ones.
//!
//! Rank 1 takes part in the gathers only when rank 0 is about to read. So the values are certainly on their way then: `updated` has returned
//! before they could be there, and a reader that does not wait reads old ones. The reference is `Ddp`, which has all values all the time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use phalanx_kernels as kernels;
use phalanx_nn::autograd::no_grad;
use phalanx_nn::models::Decoder;
use phalanx_nn::{AdamW, Ema, Group, Optimizer, Parameter, Parameters, Rule, state_dict};
use phalanx_parallel::checkpoint::{Checkpoint, Saver};
use phalanx_parallel::comm::{CollectiveKind, Comm, observed};
use phalanx_parallel::data_parallel::{DataParallel, Ddp, DdpConfig};
use phalanx_parallel::launch::{Rank, Threads};
use phalanx_parallel::sharded::{Zero, ZeroConfig, ZeroStage};
use phalanx_parallel::sharded_tensor::ShardedTensor;
use phalanx_parallel::{Result, digest};
use phalanx_tensor::{DType, Device, Tensor};

use crate::gpt::{bytes, loss, model, rows};

/// Far more than a step takes on a busy machine.
const LONG: Duration = Duration::from_secs(20);
const STAGES: [ZeroStage; 2] = [ZeroStage::Optimizer, ZeroStage::Gradients];
const STEPS: u64 = 2;

/// How often rank 0 has come to a reader.
#[derive(Default)]
struct Gate {
    readers: Mutex<u64>,
    changed: Condvar,
}

impl Gate {
    fn open(&self) {
        *self.readers.lock().unwrap() += 1;
        self.changed.notify_all();
    }

    /// Waits until rank 0 is about to read for the time number `reader`, and then a little longer.
    fn wait(&self, reader: u64) {
        let (readers, waits) = (self.readers.lock().unwrap(), |readers: &mut u64| *readers < reader);
        let (readers, outcome) = self.changed.wait_timeout_while(readers, LONG, waits).unwrap();
        drop(readers);
        assert!(!outcome.timed_out(), "`updated` has waited for the other rank");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A rank in training.
struct Trainee {
    comm: Comm,
    rank: usize,
    model: Decoder,
    wrapper: Option<Box<dyn DataParallel>>,
    optimizer: Optimizer<Ema<AdamW>>,
    /// The parameters' tensors before the last step.
    before: Vec<Tensor>,
    step: u64,
}

/// Reads something of the model, on all ranks.
type Reader = fn(&mut Trainee) -> Result<Vec<Vec<u8>>>;

impl Trainee {
    fn new(rank: &Rank, comm: &Comm, stage: Option<ZeroStage>) -> Result<Trainee> {
        let (comm, model) = (comm.clone(), model(DType::F32, rank.device()));
        let wrapper: Box<dyn DataParallel> = match stage {
            Some(stage) => Box::new(Zero::new(&model, comm.clone(), ZeroConfig::new(stage))?),
            None => Box::new(Ddp::new(&model, comm.clone(), DdpConfig::default())?),
        };
        let groups = Group::decay_matrices(wrapper.parameters(), 1e-2, 0.1);
        let optimizer = Ema::new(AdamW::default(), 0.75).init(groups)?;
        let (rank, before) = (rank.rank(), Vec::new());
        Ok(Trainee { comm, rank, model, wrapper: Some(wrapper), optimizer, before, step: 0 })
    }

    fn wrapper(&self) -> &dyn DataParallel {
        &**self.wrapper.as_ref().unwrap()
    }

    fn backward(&self, micro: usize) -> Result<()> {
        let rows = rows(2, self.rank, 2).swap_remove(micro);
        self.wrapper().backward(&loss(&self.model, self.step, rows)?)
    }

    /// One step but `updated`.
    fn step(&mut self) -> Result<()> {
        self.before = self.model.parameters().iter().map(Parameter::tensor).collect();
        self.backward(0)?;
        self.optimizer.step()?;
        self.step += 1;
        self.wrapper().zero_grad()
    }

    fn values(&self) -> Result<Vec<Vec<u8>>> {
        self.model.parameters().iter().map(|p| Ok(p.tensor().to_bytes()?)).collect()
    }

    fn folder(&self) -> std::path::PathBuf {
        let wrapper: *const dyn DataParallel = self.wrapper();
        let unique = if self.rank == 0 { wrapper.addr() } else { 0 };
        let mut unique = Tensor::scalar(unique as i64, Device::CPU).unwrap();
        self.comm.broadcast(&mut unique, 0).unwrap();
        let unique = unique.item::<i64>().unwrap();
        std::env::temp_dir().join(format!("phalanx-arriving-{}-{unique}", std::process::id()))
    }
}

const READERS: &[(&str, Reader)] = &[
    ("a plain tensor", |t| t.values()),
    ("an item", |t| {
        let last = |p: &Parameter| -> Result<Vec<u8>> {
            let flat = p.tensor().with_shape(&[p.tensor().numel()])?;
            Ok(flat.select(0, flat.numel() - 1)?.item::<f32>()?.to_le_bytes().to_vec())
        };
        t.model.parameters().iter().map(last).collect()
    }),
    ("handles from before the step", |t| t.before.iter().map(|held| Ok(held.to_bytes()?)).collect()),
    ("another thread", |t| std::thread::scope(|scope| scope.spawn(|| t.values()).join().unwrap())),
    ("two threads at once", |t| {
        std::thread::scope(|scope| {
            let both = [(); 2].map(|()| scope.spawn(|| t.values()));
            Ok(both.into_iter().map(|t| t.join().unwrap()).collect::<Result<Vec<_>>>()?.concat())
        })
    }),
    ("a copy on another device", |t| {
        let copy = |p: &Parameter| Ok(p.tensor().to_device(Device::Cpu(1), false)?.to_bytes()?);
        t.model.parameters().iter().map(copy).collect()
    }),
    ("the model's state dict", |t| Ok(bytes(&state_dict(&t.model)).into_iter().map(|(_, b)| b).collect())),
    ("the wrapper's state dict", |t| {
        let state = t.wrapper().full_state_dict(&t.model)?;
        Ok(if t.rank == 0 { bytes(&state).into_iter().map(|(_, b)| b).collect() } else { vec![] })
    }),
    ("a safetensors file", |t| {
        let path = t.folder().with_extension(format!("{}.safetensors", t.rank));
        phalanx_nn::save(&t.model, &path)?;
        let read = std::fs::read(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        Ok(vec![read])
    }),
    ("a checkpoint in the background", |t| {
        let (folder, parts) = (t.folder(), t.wrapper().parts(&t.model)?);
        let mut saver = Saver::new(&t.comm)?;
        saver.save(&folder, parts, &Default::default())?;
        saver.wait()?;
        let fresh = model(DType::F32, t.model.device());
        Checkpoint::open(&folder)?.read(&ShardedTensor::all_of(&fresh))?;
        t.comm.barrier()?;
        if t.rank == 0 {
            std::fs::remove_dir_all(folder).unwrap();
        }
        Ok(bytes(&state_dict(&fresh)).into_iter().map(|(_, b)| b).collect())
    }),
    ("digests", |t| {
        let digests = digest::whole_digests(&t.comm, &t.wrapper().parts(&t.model)?)?;
        assert!(digests.unlike.is_empty());
        Ok(digests.of.values().map(|digest| digest.to_le_bytes().to_vec()).collect())
    }),
    ("validation", |t| {
        let _no_grad = no_grad();
        Ok(vec![loss(&t.model, 9, rows(2, t.rank, 1).remove(0))?.tensor().to_bytes()?])
    }),
    ("a broadcast of the model's tensors", |t| {
        t.model.parameters().iter().try_for_each(|p| t.comm.broadcast(&mut p.tensor(), 0))?;
        // Values were written.
        t.wrapper().updated()?;
        t.values()
    }),
    ("averages of the weights", |t| {
        let state = t.wrapper().full_optimizer_state(t.optimizer.state_dict()?, &t.optimizer.kinds())?;
        let mut state = bytes(&state);
        state.sort();
        Ok(if t.rank == 0 { state.into_iter().map(|(_, b)| b).collect() } else { vec![] })
    }),
    ("accumulated gradients and their norm", |t| {
        {
            let _accumulate = t.wrapper().no_sync();
            t.backward(0)?;
        }
        t.backward(1)?;
        let norm = t.wrapper().clip_grad_norm(0.05)?.norm.to_le_bytes().to_vec();
        t.wrapper().zero_grad()?;
        Ok(vec![norm])
    }),
    ("values that the program sets", |t| {
        let gathered = t.wrapper().gathered()?;
        t.model.parameters().iter().try_for_each(|p| kernels::scale_(&mut p.tensor(), 0.5))?;
        t.wrapper().updated()?;
        drop(gathered);
        t.values()
    }),
    ("two steps without a forward pass", |t| {
        t.wrapper().parameters().iter().try_for_each(|p| kernels::scale_(&mut p.tensor(), 0.5))?;
        t.wrapper().updated()?;
        t.values()
    }),
];

/// What the ranks read after each step. A rank of `Zero` is certain to read while its values are on their way.
fn run(stage: Option<ZeroStage>, reader: Reader, steps: u64) -> Vec<Vec<Vec<Vec<u8>>>> {
    let gate = Gate::default();
    let train = |rank: Rank| -> Result<Vec<_>> {
        let ended = Arc::new(AtomicUsize::new(0));
        let told = ended.clone();
        let comm = observed(
            rank.comm().clone(),
            Arc::new(move |call| {
                told.fetch_add(usize::from(call.kind == CollectiveKind::AllGather), Ordering::SeqCst);
            }),
        );
        let mut trainee = Trainee::new(&rank, &comm, stage)?;
        let read = |number: u64| -> Result<_> {
            trainee.step()?;
            let before = ended.load(Ordering::SeqCst);
            if rank.rank() == 1 && stage.is_some() {
                gate.wait(number + 1);
            }
            trainee.wrapper().updated()?;
            if rank.rank() == 0 {
                assert!(stage.is_none() || ended.load(Ordering::SeqCst) == before, "a gather has ended");
                gate.open();
            }
            reader(&mut trainee)
        };
        (0..steps).map(read).collect()
    };
    Threads::new(2).timeout(4 * LONG).run(train).unwrap()
}

#[test]
fn what_reads_values_on_their_way_reads_those_of_ddp() {
    for (name, reader) in READERS {
        let wanted = run(None, *reader, STEPS);
        assert!(
            wanted[0][0] != wanted[0][1] && !wanted[0][0].is_empty(),
            "{name}: steps change what is read"
        );
        for stage in STAGES {
            assert!(run(Some(stage), *reader, STEPS) == wanted, "{name}, {stage:?}");
        }
    }
}

#[test]
fn a_wrapper_that_is_dropped_leaves_values_on_their_way() {
    // In order: `Var`s of leaves, a backward pass without a wrapper, and a wrapper made anew.
    let readers: [Reader; 3] = [
        |t| {
            drop(t.wrapper.take());
            t.model
                .parameters()
                .iter()
                .map(|p| Ok(p.leaves()[0].var().mul_scalar(2.0)?.tensor().to_bytes()?))
                .collect()
        },
        |t| {
            drop(t.wrapper.take());
            let loss = loss(&t.model, 9, 0..2)?;
            loss.backward()?;
            t.model.parameters().iter().map(|p| Ok(p.grad()?.unwrap().to_bytes()?)).collect()
        },
        |t| {
            drop(t.wrapper.take());
            let zero = Zero::new(&t.model, t.comm.clone(), ZeroConfig::new(ZeroStage::Parameters))?;
            let _gathered = zero.gathered()?;
            t.values()
        },
    ];
    for (number, reader) in readers.into_iter().enumerate() {
        let wanted = run(None, reader, 1);
        for stage in STAGES {
            assert!(run(Some(stage), reader, 1) == wanted, "reader {number}, {stage:?}");
        }
    }
}

#[test]
fn a_rank_that_fails_meanwhile_is_an_error_of_each_reader_and_of_the_next_step() {
    for stage in STAGES {
        let (heard, start) = (Mutex::new(Vec::new()), Instant::now());
        let outcome = Threads::new(2).timeout(4 * LONG).run(|rank| -> Result<()> {
            let mut t = Trainee::new(&rank, rank.comm(), Some(stage))?;
            t.step()?;
            if rank.rank() == 1 {
                std::thread::sleep(Duration::from_millis(50));
                return Err(phalanx_parallel::Error::Config("rank 1 has had enough".into()));
            }
            t.wrapper().updated()?;
            let p = t.model.parameters().remove(0);
            for piece in t.wrapper().parameters() {
                piece.set_grad(Some(Tensor::zeros(&[piece.range().len()], DType::F32, rank.device())?));
            }
            let errors = [
                p.tensor().to_vec::<f32>().map(drop).unwrap_err().to_string(),
                p.tensor().copy().map(drop).unwrap_err().to_string(),
                loss(&t.model, 9, 0..2).map(drop).unwrap_err().to_string(),
                t.optimizer.step().unwrap_err().to_string(),
                t.wrapper().updated().unwrap_err().to_string(),
                t.wrapper().begin().unwrap_err().to_string(),
            ];
            *heard.lock().unwrap() = errors.to_vec();
            // The model is of use again when it has values.
            drop(t.wrapper.take());
            assert!(p.tensor().has_not_arrived());
            p.load(&Tensor::zeros(p.tensor().shape(), DType::F32, rank.device())?)?;
            assert!(p.tensor().to_vec::<f32>()?.iter().all(|x| *x == 0.0));
            Ok(())
        });
        assert!(outcome.unwrap_err().to_string().contains("rank 1 has had enough"));
        assert!(start.elapsed() < LONG);
        let heard = heard.into_inner().unwrap();
        assert_eq!(heard.len(), 6);
        for said in &heard {
            assert!(said.contains("rank 1") && said.contains("had enough"), "{said}");
        }
        let not_come = "the tensor's values were on their way and have not come";
        assert!(heard[0].starts_with(&format!("to_vec: {not_come}: all_gather")), "{}", heard[0]);
        assert!(heard[1].starts_with(&format!("copy: {not_come}")), "{}", heard[1]);
    }
}
