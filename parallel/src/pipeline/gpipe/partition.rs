//! [`Partition`]: which layers a stage has, and on which device.

use std::ops::Range;

use phalanx_tensor::Device;

use crate::{Error, Result};

/// Layers in a row on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageLayers {
    /// The numbers of the layers in the model.
    pub layers: Range<usize>,
    /// Where their parameters live and their operations run.
    pub device: Device,
}

/// A model's layers divided into stages, each on a device. The caller builds each layer on its device.
///
/// ```
/// use phalanx_parallel::pipeline::gpipe::Partition;
/// use phalanx_tensor::Device;
/// let partition = Partition::new(&[2, 1], &[Device::Cpu(0), Device::Cpu(1)])?;
/// assert_eq!(partition.device(1), Some(Device::Cpu(0)));
/// assert_eq!(partition.device(2), Some(Device::Cpu(1)));
/// # Ok::<(), phalanx_parallel::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    stages: Vec<StageLayers>,
}

impl Partition {
    /// Stage `i` has `balance[i]` layers and is on `devices[i]`. Further devices are not used. A device may have several
    /// stages.
    ///
    /// # Errors
    /// If a stage has no layer, or there are fewer devices than stages.
    pub fn new(balance: &[usize], devices: &[Device]) -> Result<Partition> {
        if balance.contains(&0) {
            return Err(Error::Config(format!(
                "gpipe: got a balance of {balance:?}, wanted at least 1 layer a stage"
            )));
        }
        if devices.len() < balance.len() {
            let (got, wanted) = (devices.len(), balance.len());
            return Err(Error::Config(format!(
                "gpipe: got {got} devices, wanted {wanted}, one for each stage"
            )));
        }
        let mut end = 0;
        let stage = |(&layers, &device): (&usize, &Device)| {
            end += layers;
            StageLayers { layers: end - layers..end, device }
        };
        Ok(Partition { stages: balance.iter().zip(devices).map(stage).collect() })
    }

    /// The stages, in order.
    pub fn stages(&self) -> &[StageLayers] {
        &self.stages
    }

    /// The number of layers of all stages together.
    pub fn layers(&self) -> usize {
        self.stages.last().map_or(0, |stage| stage.layers.end)
    }

    /// The stage that has this layer.
    pub fn stage(&self, layer: usize) -> Option<usize> {
        self.stages.iter().position(|stage| stage.layers.contains(&layer))
    }

    /// The device of this layer.
    pub fn device(&self, layer: usize) -> Option<Device> {
        Some(self.stages[self.stage(layer)?].device)
    }

    /// The device of each stage.
    pub fn devices(&self) -> Vec<Device> {
        self.stages.iter().map(|stage| stage.device).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICES: [Device; 3] = [Device::Cpu(0), Device::Cpu(1), Device::Cpu(2)];

    #[test]
    fn stages_take_their_layers_in_order_and_devices_beyond_them_are_left() {
        let partition = Partition::new(&[1, 3], &DEVICES).unwrap();
        let stage = |layers, device| StageLayers { layers, device };
        assert_eq!(partition.stages(), [stage(0..1, DEVICES[0]), stage(1..4, DEVICES[1])]);
        assert_eq!((partition.layers(), partition.devices()), (4, DEVICES[..2].to_vec()));
        assert_eq!([0, 1, 3, 4].map(|layer| partition.stage(layer)), [Some(0), Some(1), Some(1), None]);
    }

    #[test]
    fn empty_stages_and_too_few_devices_are_refused() {
        let message = |balance: &[usize]| Partition::new(balance, &DEVICES).unwrap_err().to_string();
        assert_eq!(message(&[2, 0]), "gpipe: got a balance of [2, 0], wanted at least 1 layer a stage");
        assert_eq!(message(&[1; 4]), "gpipe: got 3 devices, wanted 4, one for each stage");
    }
}
