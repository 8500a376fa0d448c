//! [`Reducer`]: the buckets' buffers, and what has come to them in this pass.

use std::sync::{Mutex, MutexGuard, PoisonError};

use phalanx_kernels as kernels;
use phalanx_nn::Parameter;
use phalanx_nn::autograd::Slot;
use phalanx_tensor::{Category, DType, Device, Tensor};

use super::hook::Rest;
use super::{Average, Buckets, DdpConfig, GradSize, Launcher};
use crate::comm::{Comm, Reduction};
use crate::{Error, Result};

pub(super) struct Reducer {
    parameters: Vec<Parameter>,
    sizes: Vec<GradSize>,
    comm: Comm,
    config: DdpConfig,
    state: Mutex<State>,
}

struct State {
    buckets: Buckets,
    /// Each bucket's gradients, one after the other.
    buffers: Vec<Tensor>,
    /// Each parameter's part of a buffer, in its shape.
    views: Vec<Tensor>,
    /// Whether the buckets were rebuilt in the order of arrival.
    rebuilt: bool,
    launcher: Launcher,
    /// What is left of the buckets that were launched.
    started: Vec<Rest>,
    /// Sites of each parameter that backward has not come to.
    sites: Vec<usize>,
    /// Whether a parameter got a gradient since the last synchronisation.
    touched: Vec<bool>,
    /// Parameters without a gradient anywhere, whose slot is their own until they get one.
    apart: Vec<bool>,
}

impl Reducer {
    pub(super) fn new(parameters: Vec<Parameter>, comm: Comm, config: DdpConfig) -> Result<Reducer> {
        let size = |p: &Parameter| GradSize {
            elements: p.tensor().numel(),
            dtype: config.grad_dtype.unwrap_or(p.dtype()),
            device: p.device(),
        };
        let sizes: Vec<GradSize> = parameters.iter().map(size).collect();
        let order: Vec<usize> = (0..sizes.len()).rev().collect();
        let buckets = Buckets::fill(&order, &sizes, config.first_bucket_bytes, config.bucket_bytes);
        let (buffers, views) = allocate(&buckets, &sizes, &parameters)?;
        let sites = parameters.iter().map(|p| p.leaves().len()).collect();
        for (parameter, (view, size)) in parameters.iter().zip(views.iter().zip(&sizes)) {
            parameter.set_grad_dtype(size.dtype)?;
            parameter.leaves()[0].set_slot(Slot::Into(view.clone()))?;
        }
        let state = State {
            launcher: Launcher::new(&buckets),
            buckets,
            buffers,
            views,
            rebuilt: false,
            started: Vec::new(),
            sites,
            touched: vec![false; sizes.len()],
            apart: vec![false; sizes.len()],
        };
        Ok(Reducer { parameters, sizes, comm, config, state: Mutex::new(state) })
    }

    pub(super) fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    pub(super) fn buckets(&self) -> Vec<Vec<String>> {
        let name = |&number: &usize| self.parameters[number].name().to_string();
        self.lock().buckets.members().iter().map(|members| members.iter().map(name).collect()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A site of a parameter has its gradient of this pass.
    pub(super) fn arrived(&self, number: usize, site: usize, synchronise: bool) -> Result<()> {
        let mut state = self.lock();
        state.touched[number] = true;
        if site == 0 && state.apart[number] {
            self.rejoin(&mut state, number)?;
        }
        if !synchronise {
            return Ok(());
        }
        let Some(left) = state.sites[number].checked_sub(1) else {
            let why = "its gradient came again after it was sent; give each use a site of its own";
            return Err(phalanx_nn::Error::invalid(self.parameters[number].name(), why).into());
        };
        state.sites[number] = left;
        if left == 0 { self.launch(&mut state, number) } else { Ok(()) }
    }

    /// Puts a gradient that came after all into its bucket.
    fn rejoin(&self, state: &mut State, number: usize) -> Result<()> {
        let (leaf, view) = (&self.parameters[number].leaves()[0], &mut state.views[number]);
        if let Some(grad) = leaf.grad() {
            kernels::copy_(view, grad.tensor())?;
        }
        leaf.set_slot(Slot::Into(view.clone()))?;
        state.apart[number] = false;
        Ok(())
    }

    /// Starts the buckets that may go now that a parameter's gradient is complete.
    fn launch(&self, state: &mut State, number: usize) -> Result<()> {
        for bucket in state.launcher.arrive(number) {
            for &member in &state.buckets.members()[bucket] {
                if !state.apart[member] {
                    self.parameters[member].finish_grad()?;
                }
            }
            let buffer = &mut state.buffers[bucket];
            if self.config.average == Average::Mean {
                kernels::scale_(buffer, 1.0 / self.comm.size() as f64)?;
            }
            state.started.push(self.config.hook.start(bucket, buffer, &self.comm)?);
        }
        Ok(())
    }

    /// Launches what is left, waits for everything, and gets ready for the next pass.
    pub(super) fn finish(&self) -> Result<()> {
        let state = &mut *self.lock();
        let missing = state.launcher.missing();
        if !missing.is_empty() && !self.config.find_unused {
            let parameters = missing.iter().map(|&number| self.parameters[number].name().into()).collect();
            return Err(Error::Unused { parameters });
        }
        let arrivals = state.launcher.arrivals().to_vec();
        missing.into_iter().try_for_each(|number| self.launch(state, number))?;
        std::mem::take(&mut state.started).into_iter().try_for_each(|rest| rest())?;
        if self.config.find_unused {
            self.set_unused_apart(state)?;
        }
        if !state.rebuilt {
            self.rebuild(state, arrivals)?;
        }
        state.launcher = Launcher::new(&state.buckets);
        state.sites = self.parameters.iter().map(|p| p.leaves().len()).collect();
        state.touched.fill(false);
        Ok(())
    }

    /// A parameter that no rank used has no gradient, rather than one of zeros, which an optimizer would act on.
    fn set_unused_apart(&self, state: &mut State) -> Result<()> {
        let touched: Vec<i32> = state.touched.iter().map(|&t| i32::from(t)).collect();
        let mut touched = Tensor::from_slice(&touched, &[touched.len()], Device::CPU)?;
        self.comm.all_reduce(&mut touched, Reduction::Max)?;
        for (number, touched) in touched.to_vec::<i32>()?.into_iter().enumerate() {
            let leaf = &self.parameters[number].leaves()[0];
            if touched == 0 {
                leaf.set_slot(Slot::Owned(Some(self.sizes[number].dtype)))?;
            } else if state.apart[number] {
                leaf.set_slot(Slot::Into(state.views[number].clone()))?;
            }
            state.apart[number] = touched == 0;
        }
        Ok(())
    }

    /// Fills buckets anew, once, in the order in which rank 0's gradients came.
    fn rebuild(&self, state: &mut State, mut order: Vec<usize>) -> Result<()> {
        let late: Vec<usize> = (0..self.parameters.len()).filter(|number| !order.contains(number)).collect();
        order.extend(late);
        let mine: Vec<i64> = order.iter().map(|&number| number as i64).collect();
        let mut first = Tensor::from_slice(&mine, &[mine.len()], Device::CPU)?;
        self.comm.broadcast(&mut first, 0)?;
        let order: Vec<usize> = first.to_vec::<i64>()?.into_iter().map(|number| number as usize).collect();
        let sizes = (self.config.first_bucket_bytes, self.config.bucket_bytes);
        let buckets = Buckets::fill(&order, &self.sizes, sizes.0, sizes.1);
        state.rebuilt = true;
        if buckets == state.buckets {
            return Ok(());
        }
        let (buffers, mut views) = allocate(&buckets, &self.sizes, &self.parameters)?;
        for (number, parameter) in self.parameters.iter().enumerate() {
            kernels::copy_(&mut views[number], &state.views[number])?;
            if !state.apart[number] {
                parameter.leaves()[0].set_slot(Slot::Into(views[number].clone()))?;
            }
        }
        (state.buckets, state.buffers, state.views) = (buckets, buffers, views);
        Ok(())
    }
}

/// A buffer of zeros for each bucket, and each parameter's view of one.
fn allocate(
    buckets: &Buckets,
    sizes: &[GradSize],
    parameters: &[Parameter],
) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
    let (mut buffers, mut views) = (Vec::new(), vec![None; sizes.len()]);
    for members in buckets.members() {
        let total = members.iter().map(|&number| sizes[number].elements).sum();
        let (dtype, device): (DType, Device) = members
            .first()
            .map_or((DType::F32, Device::CPU), |&number| (sizes[number].dtype, sizes[number].device));
        let buffer = Tensor::zeros(&[total], dtype, device)?.tagged(Category::Gradients);
        let mut at = 0;
        for &number in members {
            let part = buffer.narrow(0, at, sizes[number].elements)?;
            views[number] = Some(part.with_shape(parameters[number].tensor().shape())?);
            at += sizes[number].elements;
        }
        buffers.push(buffer);
    }
    Ok((buffers, views.into_iter().flatten().collect()))
}
