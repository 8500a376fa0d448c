//! Parameters, modules, losses, optimizers, data, models.
#![forbid(unsafe_code)]
