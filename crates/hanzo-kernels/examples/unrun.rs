//! After the tests: fails if an op, as it is now, has not run on the host harness at waves of 8, 32 and 64, or a format in none. Vulkan's own
//! kernels, of cooperative matrices, run on such hardware only.

fn main() {
    let missing = hanzo_kernels::host::unrun(&[8, 32, 64]);
    for (kernel, wave) in &missing {
        println!("{kernel} has not run on the host harness at waves of {wave}");
    }
    if !missing.is_empty() {
        eprintln!("{} are missing: give them a test of hanzo-kernels, or run its tests first", missing.len());
        std::process::exit(1);
    }
}
