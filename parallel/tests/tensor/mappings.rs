//! The conjugate collectives: what every rank gets forward, and what comes back. The loss over a vocabulary that is split is
//! that of one device.

use phalanx_nn::autograd::{CrossEntropy, Options, Reduction, Result, Var, grad};
use phalanx_nn::cut;
use phalanx_nn::tensor::{DType, Device, Tensor};
use phalanx_parallel::comm::Comm;
use phalanx_parallel::launch;
use phalanx_parallel::tensor_parallel::{
    all_gather, copy_to_region, gather_from_region, reduce_from_region, reduce_scatter, scatter_to_region,
    vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy,
};

use crate::kit::assert_close;

const RANKS: usize = 3;

/// `[2, width, 2]`, each element its number plus 100 times the rank.
fn numbered(rank: usize, width: usize) -> Vec<f64> {
    (0..4 * width).map(|i| (100 * rank + i) as f64).collect()
}

/// Part `rank` of rows of `2 * width` numbers.
fn part(whole: &[f64], rank: usize) -> Vec<f64> {
    let row = whole.len() / 2;
    whole.chunks(row).flat_map(|row| row.chunks(row.len() / RANKS).nth(rank).unwrap().to_vec()).collect()
}

/// The parts of all ranks side by side.
fn side_by_side(parts: &[Vec<f64>]) -> Vec<f64> {
    let row =
        |i: usize| parts.iter().flat_map(move |part| part.chunks(part.len() / 2).nth(i).unwrap().to_vec());
    row(0).chain(row(1)).collect()
}

/// How many classes each rank has.
fn lengths(classes: usize, ranks: usize) -> Vec<usize> {
    cut(classes, ranks).iter().map(|range| range.len()).collect()
}

fn sum(all: &[Vec<f64>]) -> Vec<f64> {
    (0..all[0].len()).map(|i| all.iter().map(|values| values[i]).sum()).collect()
}

/// Every rank's result of `f` for its numbers of `widths[0]`, and its gradient for gradients of `widths[1]`.
fn run(f: impl Fn(&Var, &Comm) -> Result<Var> + Sync, widths: [usize; 2]) -> Vec<[Vec<f64>; 2]> {
    let rank = |rank: launch::Rank| -> Result<[Vec<f64>; 2]> {
        let tensor =
            |width: usize| Tensor::from_slice(&numbered(rank.rank(), width), &[2, width, 2], rank.device());
        let x = Var::leaf(tensor(widths[0])?)?;
        let y = f(&x, rank.comm())?;
        let dx = grad(&[(y.clone(), Some(Var::new(tensor(widths[1])?)))], &[&x], Options::default())?;
        // The input is as it was.
        assert_eq!(x.to_vec::<f64>()?, numbered(rank.rank(), widths[0]));
        Ok([y.to_vec()?, dx[0].as_ref().unwrap().to_vec()?])
    };
    launch::threads(RANKS, rank).unwrap()
}

fn all(width: usize) -> Vec<Vec<f64>> {
    (0..RANKS).map(|rank| numbered(rank, width)).collect()
}

#[test]
fn what_is_copied_to_the_region_comes_back_summed() {
    for (rank, [y, dx]) in run(copy_to_region, [2, 2]).into_iter().enumerate() {
        assert_eq!((y, dx), (numbered(rank, 2), sum(&all(2))));
    }
}

#[test]
fn what_is_reduced_from_the_region_comes_back_as_it_is() {
    for (rank, [y, dx]) in run(reduce_from_region, [2, 2]).into_iter().enumerate() {
        assert_eq!((y, dx), (sum(&all(2)), numbered(rank, 2)));
    }
}

#[test]
fn what_is_scattered_comes_back_gathered() {
    for (rank, [y, dx]) in run(|x, comm| scatter_to_region(x, 1, comm), [6, 2]).into_iter().enumerate() {
        assert_eq!((y, dx), (part(&numbered(rank, 6), rank), side_by_side(&all(2))));
    }
}

#[test]
fn what_is_gathered_comes_back_scattered() {
    for (rank, [y, dx]) in run(|x, comm| gather_from_region(x, 1, comm), [2, 6]).into_iter().enumerate() {
        assert_eq!((y, dx), (side_by_side(&all(2)), part(&numbered(rank, 6), rank)));
    }
}

#[test]
fn what_is_gathered_for_different_uses_comes_back_as_a_part_of_the_sum() {
    for (rank, [y, dx]) in run(|x, comm| all_gather(x, 1, comm), [2, 6]).into_iter().enumerate() {
        assert_eq!((y, dx), (side_by_side(&all(2)), part(&sum(&all(6)), rank)));
    }
}

#[test]
fn a_part_of_the_sum_comes_back_gathered() {
    for (rank, [y, dx]) in run(|x, comm| reduce_scatter(x, 1, comm), [6, 2]).into_iter().enumerate() {
        assert_eq!((y, dx), (part(&sum(&all(6)), rank), side_by_side(&all(2))));
    }
}

#[test]
fn the_last_dimension_can_be_named_from_the_end_and_the_first_needs_no_packing() {
    launch::threads(2, |rank| -> Result<()> {
        let x = Var::from_slice(&[rank.rank() as f64, 10.0], &[1, 2], rank.device())?;
        assert_eq!(gather_from_region(&x, -1, rank.comm())?.to_vec::<f64>()?, [0.0, 10.0, 1.0, 10.0]);
        let rows = gather_from_region(&x, 0, rank.comm())?;
        assert_eq!((rows.shape(), rows.to_vec::<f64>()?), (&[2, 2][..], vec![0.0, 10.0, 1.0, 10.0]));
        assert!(gather_from_region(&x, 2, rank.comm()).is_err());
        Ok(())
    })
    .unwrap();
}

#[test]
fn sizes_that_do_not_divide_are_refused_on_every_rank() {
    let run = |rank: launch::Rank| -> Result<()> {
        let x = Var::from_slice(&[1.0; 8], &[2, 4], rank.device())?;
        for error in [scatter_to_region(&x, 1, rank.comm()), reduce_scatter(&x, 1, rank.comm())] {
            let message = error.map(drop).unwrap_err().to_string();
            assert!(message.contains("got 4 to cut over 3 ranks, wanted a multiple of 3"), "{message}");
        }
        Ok(())
    };
    launch::threads(RANKS, run).unwrap();
}

const ITEMS: usize = 7;

/// Logits over a wide range, and targets of which some do not count.
fn inputs(classes: usize) -> (Vec<f64>, Vec<i64>) {
    let logits = (0..ITEMS * classes).map(|i| 30.0 * (i as f64 * 0.7).sin() + (i % 5) as f64).collect();
    let targets = (0..ITEMS).map(|i| if i % 3 == 2 { -100 } else { (i * i * 31 % classes) as i64 });
    (logits, targets.collect())
}

fn settings() -> Vec<CrossEntropy> {
    let of = |reduction| {
        [0.0, 0.1, 1.0].map(|label_smoothing| CrossEntropy {
            reduction,
            label_smoothing,
            scale: 0.5,
            ..CrossEntropy::default()
        })
    };
    [Reduction::None, Reduction::Sum, Reduction::Mean].into_iter().flat_map(of).collect()
}

fn tensor(values: &[f64], shape: &[usize], dtype: DType, device: Device) -> Result<Tensor> {
    Ok(phalanx_kernels::cast(&Tensor::from_slice(values, shape, device)?, dtype)?)
}

fn wide(x: &Var) -> Result<Vec<f64>> {
    x.to(DType::F64)?.to_vec()
}

/// Loss and gradient of each item's loss weighed differently.
fn both(x: &Var, loss: Var) -> Result<[Vec<f64>; 2]> {
    let weights: Vec<f64> = (0..loss.numel()).map(|i| 1.0 + i as f64).collect();
    let dy = Var::new(tensor(&weights, loss.shape(), loss.dtype(), loss.device())?);
    let dx = grad(&[(loss.clone(), Some(dy))], &[x], Options::default())?.remove(0).unwrap();
    Ok([wide(&loss)?, wide(&dx)?])
}

#[test]
fn losses_and_gradients_are_those_of_one_device() {
    for (classes, ranks) in [(256, 3), (7, 3), (4, 4), (10, 1)] {
        let (logits, targets) = inputs(classes);
        for (dtype, tolerance) in [(DType::F64, 1e-14), (DType::F32, 1e-6)] {
            for config in settings() {
                let x = Var::leaf(tensor(&logits, &[ITEMS, classes], dtype, Device::CPU).unwrap()).unwrap();
                let y = Var::from_slice(&targets, &[ITEMS], Device::CPU).unwrap();
                let [loss, dx] = both(&x, x.cross_entropy(&y, &config).unwrap()).unwrap();
                let run = |rank: launch::Rank| -> Result<[Vec<f64>; 2]> {
                    let (lengths, r) = (lengths(classes, ranks), rank.rank());
                    let whole = tensor(&logits, &[ITEMS, classes], dtype, rank.device())?;
                    let own = whole.narrow(1, lengths[..r].iter().sum(), lengths[r])?.copy()?;
                    let (x, y) = (Var::leaf(own)?, Var::from_slice(&targets, &[ITEMS], rank.device())?);
                    both(&x, vocab_parallel_cross_entropy(&x, &y, classes, rank.comm(), &config)?)
                };
                let found = launch::threads(ranks, run).unwrap();
                let what = format!("{classes} over {ranks}, {dtype}, {config:?}");
                assert!(found.iter().all(|own| own[0] == found[0][0]), "{what}: one loss on all ranks");
                assert_close(&what, &found[0][0], &loss, tolerance);
                let lengths = lengths(classes, ranks);
                let row = |i: usize| {
                    let of = |(r, own): (usize, &[Vec<f64>; 2])| {
                        own[1].chunks(lengths[r]).nth(i).unwrap().to_vec()
                    };
                    found.iter().enumerate().flat_map(of).collect::<Vec<f64>>()
                };
                assert_close(&what, &(0..ITEMS).flat_map(row).collect::<Vec<_>>(), &dx, tolerance);
            }
        }
    }
}

#[test]
fn halves_give_what_they_give_widened() {
    let (logits, targets) = inputs(7);
    for (dtype, config) in
        [DType::BF16, DType::F16].into_iter().flat_map(|d| settings().into_iter().map(move |c| (d, c)))
    {
        launch::threads(2, |rank| -> Result<()> {
            let (start, count) = [(0, 4), (4, 3)][rank.rank()];
            let whole = tensor(&logits, &[ITEMS, 7], dtype, rank.device())?;
            let own = Var::leaf(whole.narrow(1, start, count)?.copy()?)?;
            let y = Var::from_slice(&targets, &[ITEMS], rank.device())?;
            let run = |x: &Var, config: &CrossEntropy| {
                let loss = vocab_parallel_cross_entropy(x, &y, 7, rank.comm(), config)?;
                Ok::<_, phalanx_nn::autograd::Error>((loss.dtype(), both(&own, loss)?))
            };
            let (widened, want) = run(&own.to(DType::F32)?, &config)?;
            let (wide, got) = run(&own, &CrossEntropy { wide: true, ..config.clone() })?;
            assert_eq!((wide, &got), (widened, &want), "{dtype}, {config:?}");
            let (narrow, [loss, _]) = run(&own, &config)?;
            assert_eq!(narrow, dtype);
            let rounded = Var::new(tensor(&want[0], &[want[0].len()], dtype, rank.device())?);
            assert_eq!(loss, self::wide(&rounded)?, "{dtype}, {config:?}");
            Ok(())
        })
        .unwrap();
    }
}

/// With the linear map before it, the logits may come in chunks of any size.
#[test]
fn any_chunk_of_logits_has_the_bits_of_the_whole() {
    const CLASSES: usize = 37;
    let number = |i: usize| (i as f64 * 0.7).sin() * 3.0;
    let targets: Vec<i64> =
        (0..ITEMS as i64).map(|i| if i == 1 { -100 } else { i * 5 % CLASSES as i64 }).collect();
    for (dtype, config) in [DType::F64, DType::F32, DType::BF16, DType::F16].into_iter().flat_map(|dtype| {
        settings()
            .into_iter()
            .map(move |config| (dtype, CrossEntropy { ignore_index: -100, wide: true, ..config }))
    }) {
        launch::threads(3, |rank| -> Result<()> {
            let make = |shape: [usize; 2], first: usize| {
                let values: Vec<f64> = (0..shape[0] * shape[1]).map(|i| number(first + i)).collect();
                Var::leaf(tensor(&values, &shape, dtype, rank.device())?)
            };
            let own = lengths(CLASSES, 3)[rank.rank()];
            let (x, weight) = (make([ITEMS, 5], 0)?, make([own, 5], 100 * (1 + rank.rank()))?);
            let y = Var::from_slice(&targets, &[ITEMS], rank.device())?;
            let run = |logits_max: usize| -> Result<[Vec<f64>; 3]> {
                let loss = vocab_parallel_linear_cross_entropy(
                    &x,
                    &weight,
                    &y,
                    CLASSES,
                    rank.comm(),
                    &config,
                    logits_max,
                )?;
                let weights: Vec<f64> = (0..loss.numel()).map(|i| 1.0 + i as f64).collect();
                let dy = Var::new(tensor(&weights, loss.shape(), loss.dtype(), loss.device())?);
                let grads = grad(&[(loss.clone(), Some(dy))], &[&x, &weight], Options::default())?;
                let [dx, dw] = [0, 1].map(|i| grads[i].clone().expect("both are used"));
                Ok([wide(&loss)?, wide(&dx)?, wide(&dw)?])
            };
            let whole = run(usize::MAX)?;
            for logits_max in [0, own, 2 * own + 1, ITEMS * own - 1] {
                assert_eq!(run(logits_max)?, whole, "{dtype} {logits_max} {config:?}");
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn halves_are_not_copied() {
    launch::threads(2, |rank| -> Result<()> {
        // The ranks of other tests use the devices of these.
        let device = Device::Cpu(970 + rank.rank() as u16);
        let own = Var::leaf(Tensor::zeros(&[64, 2048], DType::BF16, device)?)?;
        let y = Var::new(Tensor::zeros(&[64], DType::I64, device)?);
        let ledger = device.ledger()?;
        let before = ledger.total().now;
        ledger.reset_peak();
        let config = CrossEntropy { wide: true, ..CrossEntropy::default() };
        let loss = vocab_parallel_cross_entropy(&own, &y, 4096, rank.comm(), &config)?;
        assert!(ledger.total().peak - before < 64 * 2048, "{:?}", ledger.total());
        drop(loss);
        Ok(())
    })
    .unwrap();
}

#[test]
fn gradients_have_gradients() {
    let (logits, targets) = inputs(7);
    let logits: Vec<f64> = logits.iter().map(|x| x / 20.0).collect();
    let options = Options { create_graph: true, ..Options::default() };
    let config = CrossEntropy { label_smoothing: 0.1, ..CrossEntropy::default() };
    // The gradient of the squared norm of the gradient of the squared loss.
    let x = Var::leaf(tensor(&logits, &[ITEMS, 7], DType::F64, Device::CPU).unwrap()).unwrap();
    let y = Var::from_slice(&targets, &[ITEMS], Device::CPU).unwrap();
    let loss = x.cross_entropy(&y, &config).unwrap();
    let dx = grad(&[(loss.square().unwrap(), None)], &[&x], options).unwrap().remove(0).unwrap();
    dx.square().unwrap().sum_all().unwrap().backward().unwrap();
    let wanted = x.grad().unwrap().to_vec::<f64>().unwrap();
    launch::threads(2, |rank| -> Result<()> {
        let columns = [0..4, 4..7][rank.rank()].clone();
        let whole = tensor(&logits, &[ITEMS, 7], DType::F64, rank.device())?;
        let x = Var::leaf(whole.narrow(1, columns.start, columns.len())?.copy()?)?;
        let y = Var::from_slice(&targets, &[ITEMS], rank.device())?;
        let loss = vocab_parallel_cross_entropy(&x, &y, 7, rank.comm(), &config)?;
        let dx = grad(&[(loss.square()?, None)], &[&x], options)?.remove(0).unwrap();
        reduce_from_region(&dx.square()?.sum_all()?, rank.comm())?.backward()?;
        let wanted: Vec<f64> = wanted.chunks(7).flat_map(|row| row[columns.clone()].to_vec()).collect();
        assert_close("second gradient", &x.grad().unwrap().to_vec::<f64>()?, &wanted, 1e-12);
        Ok(())
    })
    .unwrap();
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    launch::threads(2, |rank| -> Result<()> {
        let var = |shape: &[usize], dtype| {
            Ok::<_, phalanx_nn::autograd::Error>(Var::new(Tensor::zeros(shape, dtype, rank.device())?))
        };
        let targets = |values: &[i64]| Var::from_slice(values, &[values.len()], rank.device());
        let config = CrossEntropy::default();
        let weighed =
            CrossEntropy { weight: Some(Tensor::zeros(&[6], DType::F32, rank.device())?), ..config.clone() };
        let cases = [
            (
                var(&[2, 3], DType::F32)?,
                targets(&[6, 0])?,
                6,
                &config,
                "index 6 (item 0) is out of range, wanted an index below 6",
            ),
            (var(&[2, 3], DType::F32)?, targets(&[0, -1])?, 6, &config, "index -1 (item 1)"),
            (var(&[2, 4], DType::F32)?, targets(&[0, 1])?, 6, &config, "logits [2, 4]"),
            (var(&[2, 3], DType::F32)?, targets(&[0])?, 6, &config, "targets [1]"),
            (var(&[2, 3], DType::I64)?, targets(&[0, 1])?, 6, &config, "i64 logits"),
            (var(&[2, 3], DType::F32)?, targets(&[0, 1])?, 6, &weighed, "weights of the classes"),
            (var(&[2, 1], DType::F32)?, targets(&[0, 0])?, 1, &config, "got 1 to cut over 2 ranks"),
        ];
        for (x, y, classes, config, wanted) in cases {
            let error = vocab_parallel_cross_entropy(&x, &y, classes, rank.comm(), config);
            let message = error.map(drop).unwrap_err().to_string();
            assert!(message.contains(wanted), "{message}");
        }
        Ok(())
    })
    .unwrap();
}
