//! Steps of parameters whose optimizer state is in a file ([`phalanx_tensor::io::MappedFile`]): block by block, so that the process holds
//! one block of the state at a time. Source: Rajbhandari et al., "ZeRO-Infinity" (2021), section 5.2.2.

use phalanx_kernels::optim::{Item, Slice, Step};
use phalanx_tensor::Tensor;

use super::{Rule, State, StepHyperparameters};
use crate::Result;

impl State {
    /// Whether its tensors are in a file.
    pub(super) fn is_on_disk(&self) -> bool {
        self.all().any(|tensor| tensor.storage().is_on_disk())
    }

    /// Takes what is in a file out of memory.
    pub(super) fn release_pages(&self) {
        self.all().for_each(|tensor| tensor.storage().release_pages());
    }

    fn all(&self) -> impl Iterator<Item = &Tensor> {
        self.tensors.iter().chain(&self.master)
    }
}

/// A step of a parameter with its gradient and state, `block` elements at a time.
pub(super) fn in_blocks(
    rule: &impl Rule,
    block: usize,
    (param, grad, state): &mut (Tensor, Tensor, &mut State),
    (scale, factor, hyper): (f64, Option<&Tensor>, StepHyperparameters),
) -> Result<()> {
    let elements = param.numel();
    let is_flat = param.is_contiguous() && grad.is_contiguous();
    // Elements that lie apart are no range of the state.
    let block = if is_flat { block } else { elements.max(1) };
    for start in (0..elements).step_by(block) {
        let part = |tensor: &Tensor| match is_flat {
            true => tensor.view_into(start, &[block.min(elements - start)]),
            false => Ok(tensor.clone()),
        };
        let (mut param, grad) = (part(param)?, part(grad)?);
        let mut master = state.master.as_ref().map(part).transpose()?;
        let mut tensors = state.tensors.iter().map(part).collect::<phalanx_tensor::Result<Vec<_>>>()?;
        let slice = Slice { param: &mut param, master: master.as_mut(), grad: &grad, scale };
        let items = vec![Item { slice, state: &mut tensors }];
        rule.update(Step { factor, ..Step::new(items) }, hyper)?;
        state.release_pages();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use phalanx_tensor::io::MappedFile;
    use phalanx_tensor::{Context, DType, Device};

    use super::*;
    use crate::optim::testing::random;
    use crate::optim::{EMA, Ema};
    use crate::{
        Adadelta, Adafactor, Adagrad, Adam, AdamW, Adamax, Group, Lamb, Lion, Muon, Optimizer, Parameter,
        Rmsprop, Sgd,
    };

    const SHAPE: [usize; 2] = [50, 41];

    fn file() -> PathBuf {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("phalanx-disk-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        std::env::temp_dir().join(name)
    }

    fn numbers(shape: &[usize], seed: u64, dtype: DType, device: Device) -> Tensor {
        let values = Tensor::from_vec(random(shape, seed), shape, device).unwrap();
        phalanx_kernels::cast(&values, dtype).unwrap()
    }

    fn parameters(dtype: DType, device: Device) -> Vec<Parameter> {
        let of = |name, shape: &[usize]| Parameter::new(name, numbers(shape, 1, dtype, device)).unwrap();
        vec![of("matrix", &SHAPE), of("vector", &[7])]
    }

    fn set_grads(parameters: &[Parameter], step: u64) {
        for p in parameters {
            p.set_grad(Some(numbers(p.tensor().shape(), 2 + step, DType::F32, p.device())));
        }
    }

    /// The bytes of values and state after three steps.
    fn train<R: Rule>(rule: R, dtype: DType, file: Option<&MappedFile>) -> Vec<Vec<u8>> {
        let parameters = parameters(dtype, Device::CPU);
        parameters.iter().for_each(|p| p.set_grad_dtype(DType::F32).unwrap());
        let groups = Group::decay_matrices(parameters.clone(), 1e-2, 0.1);
        let mut optimizer = {
            let _memory = file.map(|file| Context::with(|c| c.host_memory = file.memory()));
            // No multiple of a vector or of a row.
            Optimizer::new(rule, groups).unwrap().with_disk_block(333)
        };
        for step in 0..3 {
            set_grads(&parameters, step);
            match step {
                1 => optimizer.step_by(&Tensor::scalar(0.3f64, Device::CPU).unwrap()).unwrap(),
                _ => optimizer.step_scaled(0.7).unwrap(),
            }
        }
        let state = optimizer.state_dict().unwrap();
        let state = state.into_iter().map(|(_, tensor)| tensor);
        parameters.iter().map(Parameter::tensor).chain(state).map(|t| t.to_bytes().unwrap()).collect()
    }

    #[test]
    fn every_rule_has_the_bits_of_memory() {
        macro_rules! check {
            ($($rule:expr),* $(,)?) => {$(
                for dtype in [DType::F32, DType::BF16] {
                    let file = MappedFile::create(file()).unwrap();
                    assert!(train($rule, dtype, Some(&file)) == train($rule, dtype, None), "{} {dtype}", stringify!($rule));
                }
            )*};
        }
        check!(
            AdamW::default(),
            Adam::default(),
            Sgd { momentum: 0.9, ..Sgd::default() },
            Lion::default(),
            Rmsprop::default(),
            Adagrad::default(),
            Adadelta::default(),
            Adamax::default(),
            Adafactor::default(),
            Lamb::default(),
            Ema::new(AdamW::default(), 0.9),
        );
        let matrix = |file: Option<&MappedFile>| {
            let parameter = parameters(DType::F32, Device::CPU).swap_remove(0);
            let _memory = file.map(|file| Context::with(|c| c.host_memory = file.memory()));
            let mut muon =
                Optimizer::new(Muon::default(), vec![Group::new(vec![parameter.clone()], 1e-2)]).unwrap();
            set_grads(std::slice::from_ref(&parameter), 0);
            muon.step().unwrap();
            parameter.tensor().to_bytes().unwrap()
        };
        let file = MappedFile::create(file()).unwrap();
        assert!(matrix(Some(&file)) == matrix(None), "Muon");
    }

    #[test]
    fn the_state_is_in_the_file_which_goes_with_it() {
        let (path, device) = (file(), Device::Cpu(85));
        let file = MappedFile::create(&path).unwrap();
        let parameters = parameters(DType::BF16, device);
        let averaged = |rule| {
            let _memory = Context::with(|c| c.host_memory = file.memory());
            Optimizer::new(rule, vec![Group::new(parameters.clone(), 1e-2)]).unwrap()
        };
        let optimizer = averaged(Ema::new(AdamW::default(), 0.9));
        // Two moments, an average and a master copy of each parameter, in whole pages.
        let (elements, ledger) = (SHAPE[0] * SHAPE[1] + 7, device.ledger().unwrap());
        let pages = 4 * ((SHAPE[0] * SHAPE[1] * 4).next_multiple_of(4096) + 4096);
        assert_eq!(optimizer.state_of(EMA).len(), 2);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), pages as u64);
        assert_eq!((ledger.on_disk().now, ledger.total().now), (4 * 4 * elements, 2 * elements));
        // The ranges of what was dropped are used again.
        drop(optimizer);
        let optimizer = averaged(Ema::new(AdamW::default(), 0.9));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), pages as u64);
        let error = MappedFile::create(&path).unwrap_err().to_string();
        assert!(error.contains(&path.display().to_string()) && error.contains("uses it"), "{error}");
        drop(file);
        assert!(path.exists(), "the state uses it");
        drop(optimizer);
        assert!(!path.exists());
        assert_eq!(ledger.on_disk().now, 0);
        let error = MappedFile::create("/dev/null/state.bin").unwrap_err().to_string();
        assert!(error.contains("/dev/null/state.bin: cannot hold tensors"), "{error}");
    }

    /// A rule that notes the largest part of a file that the process has in its memory.
    #[cfg(target_os = "linux")]
    struct Watched {
        rule: AdamW,
        path: PathBuf,
        most: std::sync::Arc<AtomicUsize>,
    }

    /// Bytes of a file in the process's memory.
    #[cfg(target_os = "linux")]
    fn resident(path: &std::path::Path) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let (mut inside, mut bytes) = (false, 0);
        for line in maps.lines() {
            let mut words = line.split_whitespace();
            match words.next() {
                Some("Rss:") if inside => {
                    bytes += words.next().and_then(|n| n.parse::<usize>().ok()).unwrap_or(0) * 1024
                }
                Some(first) if !first.ends_with(':') => inside = line.ends_with(path.to_str().unwrap()),
                _ => {}
            }
        }
        bytes
    }

    #[cfg(target_os = "linux")]
    impl Rule for Watched {
        fn state(&self) -> Vec<&'static str> {
            self.rule.state()
        }
        fn update(&self, step: Step<'_>, hyper: StepHyperparameters) -> Result<()> {
            self.rule.update(step, hyper)?;
            self.most.fetch_max(resident(&self.path), Ordering::Relaxed);
            Ok(())
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_step_has_one_block_of_the_state_in_memory() {
        const ELEMENTS: usize = 1 << 21;
        const BLOCK: usize = 1 << 17;
        let (path, most) = (file(), std::sync::Arc::new(AtomicUsize::new(0)));
        let file = MappedFile::create(&path).unwrap();
        let parameter = Parameter::new("weight", numbers(&[ELEMENTS], 1, DType::F32, Device::CPU)).unwrap();
        let rule = Watched { rule: AdamW::default(), path: path.clone(), most: most.clone() };
        let mut optimizer = {
            let _memory = Context::with(|c| c.host_memory = file.memory());
            Optimizer::new(rule, vec![Group::new(vec![parameter.clone()], 1e-2)])
                .unwrap()
                .with_disk_block(BLOCK)
        };
        let two_moments = |elements: usize| 2 * 4 * elements;
        for _ in 0..2 {
            set_grads(std::slice::from_ref(&parameter), 0);
            optimizer.step().unwrap();
            assert_eq!(resident(&path), 0);
        }
        let most = most.load(Ordering::Relaxed);
        // The system maps pages around those that are used, up to a huge page.
        assert!(most >= two_moments(BLOCK) && most <= two_moments(BLOCK) + (2 << 20), "{most}");
        assert!(two_moments(ELEMENTS) >= 4 * most);
    }
}
