//! What each writable format costs on given weights, and how fast it packs them on one core.
//!
//! `cargo run --release -p hanzo-gguf --example round_trip -- [--importance FILE] [--format NAME]... [FILE]`
//!
//! FILE holds little-endian f32 (rows as long as the importance, if given); without one, a million Gaussian weights.

use hanzo_gguf::{Format, formats};
use std::time::Instant;

fn floats(path: &str) -> Result<Vec<f32>, Box<dyn std::error::Error>> {
    let bytes = std::fs::read(path).map_err(|e| format!("{path}: {e}"))?;
    let mut values = vec![0.0; bytes.len() / 4];
    formats::to_float(Format::F32, &bytes[..values.len() * 4], &mut values);
    Ok(values)
}

/// Gaussian numbers with a standard deviation of 0.02: Box-Muller over a 64-bit linear congruential generator.
fn gaussian(n: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f64 + 0.5) / (1u64 << 24) as f64
    };
    (0..n).map(|_| (0.02 * (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()) as f32).collect()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut wanted, mut importance, mut source) = (Vec::new(), None, None);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--importance" => importance = Some(floats(&args.next().ok_or("--importance needs a file")?)?),
            "--format" => {
                let name = args.next().ok_or("--format needs a name")?;
                wanted.push(Format::from_name(&name).ok_or(format!("no format is named {name}"))?);
            }
            _ => source = Some(floats(&arg)?),
        }
    }
    let source = source.unwrap_or_else(|| gaussian(1 << 20));
    if wanted.is_empty() {
        wanted = formats::writable().collect();
    }
    println!(
        "{:<8} {:>12} {:>10} {:>10} {:>12} {:>10} {:>10}",
        "format", "rmse", "relative", "weighted", "max error", "pack M/s", "unpack M/s"
    );
    for format in wanted {
        let report = formats::round_trip(format, &source, importance.as_deref())?;
        let mut packed = vec![0; format.row_bytes(source.len()).unwrap_or(0)];
        let per_second = |start: Instant| source.len() as f64 / start.elapsed().as_secs_f64() / 1e6;
        let start = Instant::now();
        formats::from_float(format, &source, importance.as_deref(), &mut packed)?;
        let pack = per_second(start);
        let mut back = vec![0.0; source.len()];
        formats::to_float(format, &packed, &mut back); // touches the memory
        let start = Instant::now();
        formats::to_float(format, &packed, &mut back);
        let unpack = per_second(start);
        println!(
            "{format:<8} {:>12.5e} {:>10.6} {:>10.6} {:>12.4e} {pack:>10.1} {unpack:>10.1}",
            report.rmse, report.relative_rmse, report.weighted_relative_rmse, report.max_error
        );
    }
    Ok(())
}
