//! Tensors: views, copies of any layout against a *twin* (a slow, plain reference), versions, guards and the ledger.

use std::time::{Duration, Instant};

use phalanx_tensor::{Category, Context, DType, Device, Error, Layout, Result, Scalar, Storage, Tensor};
use phalanx_tensor::{ContextGuard, Event, Ledger, Pool, Read, Stream, Write, io::SafeTensors};

const fn send_and_sync<T: Send + Sync>() {}
const _: () = {
    send_and_sync::<Tensor>();
    send_and_sync::<Storage>();
    send_and_sync::<Read<'static, f32>>();
    send_and_sync::<Write<'static, f32>>();
    send_and_sync::<(Layout, DType, Device, Scalar, Context, Error)>();
    send_and_sync::<(Ledger, Pool, Stream, Event, SafeTensors)>();
};

/// How long a guard waits for another thread's: what waits for less has not waited for one, however slow the machine (an interpreter
/// takes seconds for what else takes none).
const WAIT_FOR_ANOTHER: Duration = Duration::from_secs(10);

/// Fails to compile if `T` becomes `Send`: then both impls apply and the call is ambiguous.
trait NotSend<A> {
    fn holds() {}
}
impl<T> NotSend<()> for T {}
impl<T: Send> NotSend<u8> for T {}
const _: fn() = || <ContextGuard as NotSend<_>>::holds();

#[test]
fn withheld_elements_are_refused_to_readers_and_writers_of_any_view() -> Result<()> {
    const HERE: Device = Device::Cpu(7);
    const WHY: &str = "its values are on rank 1";
    let before = HERE.ledger()?.total().now;
    let mut x = Tensor::withheld(&[2, 3], DType::F32, HERE, WHY)?;
    let mut view = x.transpose(0, 1)?.narrow(0, 1, 2)?;
    assert_eq!((x.shape(), view.shape(), view.why_withheld()), (&[2, 3][..], &[2, 2][..], Some(WHY)));
    let start = Instant::now();
    let plain = Tensor::zeros(&[2, 3], DType::F32, HERE)?;
    let refused = [
        x.read::<f32>("sum").map(drop),
        x.write::<f32>("add_").map(drop),
        view.write::<f32>("add_").map(drop),
        view.to_vec::<f32>().map(drop),
        x.copy().map(drop),
        x.copy_from(&plain),
        plain.clone().copy_from(&x),
    ];
    for done in refused {
        let error = done.unwrap_err().to_string();
        assert!(error.ends_with(": its values are on rank 1"), "{error}");
    }
    // The only handle that is left of one may not be written either.
    drop(view);
    assert!(!x.is_sole_owner() && x.write::<f32>("add_").is_err());
    assert!(start.elapsed() < WAIT_FOR_ANOTHER, "nothing is waited for");
    drop((x, plain));
    assert_eq!(HERE.ledger()?.total().now, before);
    assert_eq!(Tensor::zeros(&[1], DType::F32, HERE)?.why_withheld(), None);
    Ok(())
}

#[test]
fn one_thread_that_stands_in_its_own_way_is_told_so_soon() -> Result<()> {
    let mut x = Tensor::zeros(&[4], DType::F32, Device::CPU)?;
    let mut same = x.clone();
    let start = Instant::now();
    {
        let (_one, _two) = (x.read::<f32>("test")?, x.read::<f32>("test")?);
        let error = same.write::<f32>("add_").err().unwrap().to_string();
        assert!(error.contains("add_") && error.contains("this very thread"), "{error}");
    }
    {
        let _held = x.write::<f32>("test")?;
        assert!(matches!(same.read::<f32>("sum"), Err(Error::Busy { .. })));
    }
    assert!(start.elapsed() < WAIT_FOR_ANOTHER);
    same.write::<f32>("add_")?[0] = 1.;
    assert_eq!(same.read::<f32>("sum")?[0], 1.);
    Ok(())
}

#[test]
fn a_guard_waits_for_another_threads_longer_than_for_its_own() -> Result<()> {
    let mut x = Tensor::zeros(&[4], DType::F32, Device::CPU)?;
    let y = x.clone();
    let mut held = x.write::<f32>("test")?;
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| y.read::<f32>("sum").map(|x| x[0]));
        std::thread::sleep(Duration::from_millis(250));
        held[0] = 3.;
        drop(held);
        assert_eq!(reader.join().unwrap().unwrap(), 3.);
    });
    Ok(())
}

#[test]
fn guards_of_many_threads_lose_no_update_and_show_no_torn_state() -> Result<()> {
    // An interpreter takes turns with the threads, and those that wait take most of them.
    const ROUNDS: i64 = if cfg!(miri) { 10 } else { 300 };
    const LENGTH: usize = if cfg!(miri) { 8 } else { 256 };
    let x = Tensor::zeros(&[LENGTH], DType::I64, Device::CPU)?;
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let mut x = x.clone();
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    x.write::<i64>("test").unwrap().iter_mut().for_each(|x| *x += 1);
                }
            });
        }
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    let seen = x.read::<i64>("test").unwrap();
                    assert!(seen.iter().all(|&v| v == seen[0]));
                }
            });
        }
    });
    assert_eq!((x.to_vec::<i64>()?[LENGTH - 1], x.version()), (3 * ROUNDS, 3 * ROUNDS as u64 + 1));
    Ok(())
}

#[test]
fn views_of_views_see_the_writes_and_the_version_of_one_storage() -> Result<()> {
    let mut x = Tensor::from_vec((0..24).collect::<Vec<i32>>(), &[2, 3, 4], Device::CPU)?;
    let view = x.transpose(0, 2)?.narrow(1, 1, 2)?.i((3, .., 0))?;
    assert_eq!(view.to_vec::<i32>()?, [7, 11]);
    let before = view.version();
    x.write::<i32>("test")?[7] = 70;
    assert_eq!((view.to_vec::<i32>()?, view.version()), (vec![70, 11], before + 1));
    assert!(view.shares_storage(&x));
    let mut meta = Tensor::zeros(&[2], DType::F32, Device::Meta(0))?;
    meta.bump_version();
    assert_eq!(meta.version(), 1);
    Ok(())
}

#[test]
fn tensors_without_elements_can_be_viewed_copied_and_read() -> Result<()> {
    let x = Tensor::zeros(&[0, 5], DType::F32, Device::CPU)?;
    for view in [
        x.clone(),
        x.narrow(1, 3, 2)?,
        x.select(1, 4)?,
        x.transpose(0, 1)?,
        x.slice(1, 1, 5, 3)?,
        x.with_shape(&[7, 0])?,
        x.broadcast_to(&[3, 0, 5])?,
    ] {
        assert_eq!((view.numel(), view.to_vec::<f32>()?), (0, vec![]));
        assert!(view.copy()?.to_bytes()?.is_empty());
    }
    Ok(())
}

#[test]
fn shapes_that_overflow_are_errors() -> Result<()> {
    let (cpu, huge) = (Device::CPU, usize::MAX);
    assert!(Tensor::empty(&[huge, 2], DType::F32, cpu).is_err());
    assert!(Tensor::empty(&[huge, 0], DType::F32, cpu).is_err());
    assert!(Tensor::empty(&[1 << 62], DType::F64, Device::Meta(0)).is_err());
    assert!(Tensor::from_bytes(&[], &[huge, huge], DType::U8, cpu).is_err());
    let none = Tensor::empty(&[0], DType::F32, cpu)?;
    assert!(none.with_shape(&[1 << 32, 1 << 32]).is_err());
    let one = Tensor::zeros(&[1], DType::F32, cpu)?;
    assert!(one.broadcast_to(&[1 << 32, 1 << 32]).is_err());
    assert!(one.view_into(0, &[1 << 32, 1 << 32]).is_err());
    assert_eq!(one.slice(0, 0, 1, huge)?.to_vec::<f32>()?, [0.]);
    Ok(())
}

#[test]
fn as_strided_stays_inside_the_storage() -> Result<()> {
    let x = Tensor::from_vec((0..12).collect::<Vec<i32>>(), &[12], Device::CPU)?;
    assert_eq!(x.as_strided(&[3, 2], &[4, 3], 0)?.to_vec::<i32>()?, [0, 3, 4, 7, 8, 11]);
    assert_eq!(x.as_strided(&[2, 2], &[1, 0], 10)?.to_vec::<i32>()?, [10, 10, 11, 11]);
    assert!(x.as_strided(&[3, 2], &[4, 4], 0).is_err());
    assert!(x.as_strided(&[1], &[1], 12).is_err());
    assert!(x.as_strided(&[2], &[usize::MAX], 1).is_err());
    assert!(x.as_strided(&[usize::MAX, 2], &[0, 0], 0).is_err());
    assert!(x.as_strided(&[2], &[1, 1], 0).is_err());
    assert_eq!(x.as_strided(&[0], &[1], 12)?.numel(), 0);
    Ok(())
}

#[test]
fn the_ledger_follows_categories_peaks_and_releases() -> Result<()> {
    let device = Device::Meta(30);
    let ledger = device.ledger()?;
    let guard = Context::with(|c| c.category = Category::Gradients);
    let x = Tensor::zeros(&[10], DType::F64, device)?;
    drop(guard);
    let y = Tensor::zeros(&[5], DType::F64, device)?;
    assert_eq!(ledger.category(Category::Gradients).now, 80);
    let view = x.narrow(0, 0, 2)?;
    let x = x.tagged(Category::Parameters);
    assert_eq!(
        (ledger.category(Category::Gradients).now, ledger.category(Category::Gradients).peak),
        (0, 80)
    );
    assert_eq!((ledger.category(Category::Parameters).now, ledger.total().now), (80, 120));
    drop((x, y));
    assert_eq!(ledger.total().now, 80, "the view keeps the storage");
    drop(view);
    assert_eq!((ledger.total().now, ledger.total().peak), (0, 120));
    let table = ledger.to_string();
    assert!(table.contains("parameters") && table.contains("120 B"), "{table}");
    Ok(())
}

#[test]
fn parts_cover_the_dimension() -> Result<()> {
    let x = Tensor::from_vec((0..10).collect::<Vec<i32>>(), &[2, 5], Device::CPU)?;
    let (a, b) = x.split_at(1, 2)?;
    assert_eq!((a.to_vec::<i32>()?, b.shape()), (vec![0, 1, 5, 6], &[2, 3][..]));
    let sizes = |n| -> Result<Vec<usize>> { Ok(x.chunk(-1, n)?.iter().map(|c| c.shape()[1]).collect()) };
    assert_eq!((sizes(2)?, sizes(4)?, sizes(9)?), (vec![3, 2], vec![2, 2, 1], vec![1; 5]));
    assert_eq!(x.unbind(0)?[1].to_vec::<i32>()?, [5, 6, 7, 8, 9]);
    assert_eq!(x.unsqueeze(0)?.flatten(0, 1)?.shape(), [2, 5]);
    assert_eq!(x.flatten(0, -1)?.shape(), [10]);
    assert!(x.split_at(0, 3).is_err() && x.chunk(0, 0).is_err() && x.flatten(1, 0).is_err());
    Ok(())
}

#[test]
fn indices_outside_are_errors() -> Result<()> {
    let x = Tensor::from_vec((0..24).collect::<Vec<i32>>(), &[2, 3, 4], Device::CPU)?;
    assert_eq!(x.i((.., 1..3, 2))?.to_vec::<i32>()?, [6, 10, 18, 22]);
    assert_eq!(x.i((1.., ..=0, ..2))?.to_vec::<i32>()?, [12, 13]);
    assert!(x.i(2).is_err() && x.i(1..3).is_err() && x.i((0, 0, 0, 0)).is_err());
    #[allow(clippy::reversed_empty_ranges)]
    let reversed = x.i(2..1);
    assert!(reversed.is_err() && x.i((.., ..=usize::MAX)).is_err());
    assert_eq!(x.i((.., 3..))?.shape(), [2, 0, 4]);
    Ok(())
}

#[test]
fn large_and_odd_tensors_print_aligned_and_short() -> Result<()> {
    let x = Tensor::from_vec((0..2000).collect::<Vec<i64>>(), &[40, 50], Device::CPU)?;
    let text = x.to_string();
    assert!(text.starts_with("[[   0,    1,    2, ...,   47,   48,   49],\n [  50,"), "{text}");
    assert!(text.contains(",\n ...,\n [1850,") && text.ends_with("Tensor [40, 50] i64 cpu:0"), "{text}");
    let odd = Tensor::from_slice(&[f32::NAN, f32::NEG_INFINITY, 1e-9, 2.], &[4], Device::CPU)?;
    assert!(odd.to_string().starts_with("[      nan,      -inf, 1.0000e-9,  2.0000e0]\n"), "{odd}");
    assert_eq!(format!("{:?}", Tensor::scalar(true, Device::CPU)?), "true\nTensor [] bool cpu:0");
    assert_eq!(Tensor::zeros(&[2, 0], DType::F16, Device::CPU)?.to_string(), "[]\nTensor [2, 0] f16 cpu:0");
    let meta = Tensor::zeros(&[1 << 40], DType::BF16, Device::Meta(0))?;
    assert_eq!(meta.to_string(), "Tensor [1099511627776] bf16 meta:0");
    let cube = Tensor::from_slice(&[1u8, 2, 3, 4], &[2, 1, 2], Device::CPU)?;
    assert!(cube.to_string().starts_with("[[[1, 2]],\n\n [[3, 4]]]\n"), "{cube}");
    let row = Tensor::zeros(&[100], DType::F32, Device::CPU)?.to_string();
    assert!(row.lines().count() > 3 && row.lines().all(|l| l.len() <= 80), "{row}");
    Ok(())
}

/// Copies of any layout against a plain twin.
mod copies {
    use phalanx_tensor::{DType, Device, Result, Tensor};
    use proptest::prelude::*;

    /// Element by element.
    fn naive(x: &Tensor, storage: &[i32]) -> Vec<i32> {
        let (shape, strides) = (x.shape(), x.strides());
        (0..x.numel())
            .map(|mut index| {
                let mut at = x.offset();
                for dim in (0..shape.len()).rev() {
                    at += index % shape[dim] * strides[dim];
                    index /= shape[dim];
                }
                storage[at]
            })
            .collect()
    }

    /// A view over views over views.
    fn view(mut x: Tensor, steps: &[(u8, usize, usize)]) -> Result<Tensor> {
        for &(kind, a, b) in steps {
            let dim = a % x.rank();
            let size = x.shape()[dim];
            x = match kind {
                0 => x.transpose(dim, b % x.rank())?,
                1 => x.narrow(dim, b % (size + 1), size - b % (size + 1))?,
                2 => x.slice(dim, 0, size, b % 4 + 1)?,
                3 if x.rank() < 6 && x.numel() < 20_000 => {
                    let mut shape = x.unsqueeze(dim)?.shape().to_vec();
                    shape[dim] = b % 3 + 1;
                    x.unsqueeze(dim)?.broadcast_to(&shape)?
                }
                4 if x.rank() > 1 => x.select(dim, b % size.max(1)).unwrap_or(x),
                _ => x,
            };
        }
        Ok(x)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_copy_of_any_view_equals_the_naive_one(
            shape in prop_oneof![prop::collection::vec(0usize..7, 1..5), prop::collection::vec(1usize..90, 2..4)],
            steps in prop::collection::vec((0u8..5, 0usize..6, 0usize..100), 0..6),
        ) {
            let numel: usize = shape.iter().product();
            let storage: Vec<i32> = (0..numel as i32).collect();
            let x = view(Tensor::from_slice(&storage, &shape, Device::CPU).unwrap(), &steps).unwrap();
            let copy = x.copy().unwrap();
            prop_assert!(copy.is_contiguous() && copy.shape() == x.shape());
            prop_assert_eq!(copy.to_vec::<i32>().unwrap(), naive(&x, &storage));
            prop_assert_eq!(x.to_vec::<i32>().unwrap(), naive(&x, &storage));
        }
    }

    #[test]
    fn transposes_of_every_dtype_and_thread_count_move_every_element() -> Result<()> {
        let device = Device::Cpu(20);
        for threads in [1, 3] {
            device.set_threads(threads)?;
            for (rows, columns) in [(8, 8), (31, 33), (64, 100), (257, 300), (1, 40), (1000, 9)] {
                for dtype in DType::ALL {
                    let size = dtype.size();
                    // Bools hold 0 and 1 only.
                    let top = if dtype == DType::Bool { 2 } else { 251 };
                    let bytes: Vec<u8> = (0..rows * columns * size).map(|i| (i % top) as u8).collect();
                    let x = Tensor::from_bytes(&bytes, &[rows, columns], dtype, device)?.transpose(0, 1)?;
                    let moved = x.copy()?.to_bytes()?;
                    for (at, got) in moved.chunks(size).enumerate() {
                        let from = (at % rows * columns + at / rows) * size;
                        assert_eq!(got, &bytes[from..from + size], "{dtype} {rows}x{columns} at {at}");
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn large_permutations_are_moved_in_pieces_without_loss() -> Result<()> {
        let storage: Vec<i32> = (0..6 * 70 * 5 * 64).collect();
        let x = Tensor::from_slice(&storage, &[6, 70, 5, 64], Device::CPU)?;
        for dims in [[0, 2, 1, 3], [0, 2, 3, 1], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]] {
            let turned = x.permute(&dims)?;
            assert_eq!(turned.to_vec::<i32>()?, naive(&turned, &storage), "{dims:?}");
        }
        Ok(())
    }

    #[test]
    fn a_tensor_is_overwritten_by_another_of_its_form() {
        let from = Tensor::from_slice(&[1i32, 2, 3, 4], &[2, 2], Device::CPU).unwrap();
        let whole = Tensor::zeros(&[3, 2], DType::I32, Device::Cpu(1)).unwrap();
        whole.narrow(0, 1, 2).unwrap().copy_from(&from.transpose(0, 1).unwrap()).unwrap();
        assert_eq!(whole.to_vec::<i32>().unwrap(), [0, 0, 1, 3, 2, 4]);
        // Parts of one storage that overlap: read before they are written.
        whole.narrow(0, 0, 2).unwrap().copy_from(&whole.narrow(0, 1, 2).unwrap()).unwrap();
        assert_eq!(whole.to_vec::<i32>().unwrap(), [1, 3, 2, 4, 2, 4]);
        let refused = |from: &Tensor| whole.clone().copy_from(from).unwrap_err().to_string();
        assert!(refused(&from).contains("copy_from"), "{}", refused(&from));
        let other = Tensor::zeros(&[3, 2], DType::F32, Device::CPU).unwrap();
        assert!(refused(&other).contains("f32"), "{}", refused(&other));
        let mut strided = from.transpose(0, 1).unwrap();
        assert!(strided.copy_from(&from).unwrap_err().to_string().contains("contiguous"));
    }
}
