//! Parameters, modules, losses, optimizers, data, models.
