//! cuBLASLt's C interface: it knows all other files, and none of them knows it.

use std::ffi::c_char;

use phalanx_emulator_link::driver::Driver;
use phalanx_emulator_link::pointer::{Host, In, Out};

use crate::description::{self, Bias, DESCRIPTIONS, Description};
use crate::element::ElementType;
use crate::layout::{self, LAYOUTS, Layout, value};
use crate::matmul::{Matmul, Scale, address, submit};
use crate::plan::{
    Algorithm, HeuristicResult, LIBRARIES, MAX_WORKSPACE_BYTES, PREFERENCES, WORKSPACE_ALIGNMENT, algorithms,
    check, found, plan,
};
use crate::status::{Status, answer, name, present};

phalanx_emulator_link::export! {
    fn phalanx_emulated_cublaslt_name() -> *const c_char { c"phalanx emulated cuBLASLt".as_ptr() }
    fn cublasLtGetStatusName(status: i32) -> *const c_char { name(status).as_ptr() }
    fn cublasLtGetStatusString(status: i32) -> *const c_char { name(status).as_ptr() }
    fn cublasLtGetVersion() -> usize { 130_000 }
    fn cublasLtGetCudartVersion() -> usize { 13_000 }
}

phalanx_emulator_link::export! {
    answered by answer;
    fn cublasLtCreate(handle: Out<usize>) {
        Driver::loaded().map_err(|why| Status::NOT_INITIALIZED.because(why))?;
        present(handle.set(LIBRARIES.add(())), "handle")
    }
    fn cublasLtDestroy(handle: usize) { Ok(LIBRARIES.remove(handle).map(drop)?) }
    fn cublasLtLoggerSetLevel(level: i32) { Ok(()) }
    fn cublasLtLoggerOpenFile(file: Host) { Ok(()) }
    fn cublasLtMatrixLayoutCreate(out: Out<usize>, kind: i32, rows: u64, columns: u64, leading: i64) {
        let kind = ElementType::from_number(kind)?;
        let (rows, columns) = (rows as usize, columns as usize);
        let leading = layout::size("the leading dimension", leading)?;
        let layout = Layout { kind, by_rows: false, rows, columns, leading, batches: 1, batch_stride: 0 };
        present(out.set(LAYOUTS.add(layout)), "matLayout")
    }
    fn cublasLtMatrixLayoutDestroy(layout: usize) { Ok(LAYOUTS.remove(layout).map(drop)?) }
    fn cublasLtMatrixLayoutSetAttribute(layout: usize, attribute: i32, at: Host, bytes: usize) {
        LAYOUTS.change(layout, |layout| layout::set(layout, attribute, at, bytes))
    }
    fn cublasLtMatrixLayoutGetAttribute(layout: usize, attribute: i32, to: Host, bytes: usize, written: Out<usize>) {
        let size = layout::get(&LAYOUTS.get(layout)?, attribute, to)?;
        if written.is_null() { Ok(()) } else { present(written.set(size), "sizeWritten") }
    }
    fn cublasLtMatmulDescCreate(out: Out<usize>, compute_type: i32, scale: i32) {
        present(out.set(DESCRIPTIONS.add(Description::new(compute_type, scale)?)), "matmulDesc")
    }
    fn cublasLtMatmulDescDestroy(description: usize) { Ok(DESCRIPTIONS.remove(description).map(drop)?) }
    fn cublasLtMatmulDescSetAttribute(description: usize, attribute: i32, at: Host, bytes: usize) {
        DESCRIPTIONS.change(description, |d| description::set(d, attribute, at, bytes))
    }
    fn cublasLtMatmulPreferenceCreate(out: Out<usize>) { present(out.set(PREFERENCES.add(0)), "pref") }
    fn cublasLtMatmulPreferenceDestroy(preference: usize) { Ok(PREFERENCES.remove(preference).map(drop)?) }
    fn cublasLtMatmulPreferenceSetAttribute(preference: usize, attribute: i32, at: Host, bytes: usize) {
        PREFERENCES.change(preference, |bytes_max| {
            if attribute == MAX_WORKSPACE_BYTES {
                *bytes_max = value("maximal workspace", at, bytes)?;
            }
            Ok(())
        })
    }
    fn cublasLtMatmulAlgoGetHeuristic(
        library: usize, operation: usize, a: usize, b: usize, c: usize, d: usize, preference: usize, room: i32,
        results: Out<HeuristicResult>, count: Out<i32>,
    ) {
        present(count.set(0), "returnAlgoCount")?;
        if room < 1 {
            return Err(Status::INVALID_VALUE.because("no algorithm is asked for"));
        }
        let plan = plan(library, operation, [a, b, c, d])?;
        let bytes_max = if preference == 0 { 0 } else { PREFERENCES.get(preference)? };
        let choices = algorithms(&plan, bytes_max).into_iter().take(room as usize);
        let stored = choices.enumerate().map(|(i, choices)| results.set_at(i, found(choices)));
        let stored = present(stored.collect::<Option<Vec<()>>>(), "heuristicResultsArray")?.len();
        present(count.set(stored as i32), "returnAlgoCount")
    }
    fn cublasLtMatmulAlgoCheck(
        library: usize, operation: usize, a: usize, b: usize, c: usize, d: usize, algorithm: In<Algorithm>,
        result: Out<HeuristicResult>,
    ) {
        plan(library, operation, [a, b, c, d])?;
        present(result.set(found(check(algorithm)?)), "result")
    }
    fn cublasLtMatmul(
        library: usize, operation: usize, alpha: Host, a: Host, a_layout: usize, b: Host, b_layout: usize, beta: Host,
        c: Host, c_layout: usize, d: Host, d_layout: usize, algorithm: In<Algorithm>, workspace: Host,
        workspace_bytes: usize, stream: usize,
    ) {
        let plan = plan(library, operation, [a_layout, b_layout, c_layout, d_layout])?;
        let choices = check(algorithm)?;
        let wanted = choices.workspace_bytes;
        if wanted > 0 && (wanted > workspace_bytes as u64 || workspace.is_null()) {
            let why = format!("the algorithm wants a workspace of {wanted} bytes and got {workspace_bytes}");
            return Err(Status::INVALID_VALUE.because(why));
        }
        if wanted > 0 && !(workspace.address() as u64).is_multiple_of(WORKSPACE_ALIGNMENT) {
            return Err(Status::INVALID_VALUE.because("the workspace begins at no multiple of 256"));
        }
        let workspace = (workspace.address() as u64, wanted);
        let description = plan.description;
        let scale = |at, name| Scale::new(at, description.scale, description.scale_on_device, name);
        let (alpha, beta) = (scale(alpha, "alpha")?, scale(beta, "beta")?);
        let c = if beta == Scale::Known(0.0) { 0 } else { address(c, "C")? };
        if c == d.address() as u64 && plan.c != plan.d {
            return Err(Status::INVALID_VALUE.because("C and D are at the same place with different layouts"));
        }
        if description.epilogue.bias != Bias::None && description.bias == 0 {
            return Err(Status::INVALID_VALUE.because("the epilogue has a bias, but the bias pointer is not set"));
        }
        if description.epilogue.uses_aux() && description.aux == 0 {
            return Err(Status::INVALID_VALUE.because("the epilogue has an aux, but the aux pointer is not set"));
        }
        let (a, b, d) = (address(a, "A")?, address(b, "B")?, address(d, "D")?);
        let chains = choices.chains;
        submit(Matmul { plan, alpha, beta, a, b, c, d, workspace, chains }, stream)
    }
}
