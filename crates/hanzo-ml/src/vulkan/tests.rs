//! The device layer on whatever device 0 is (lavapipe in CI), under the validation layer.
//!
//! These tests need a Vulkan driver and fail without one; `HANZO_NO_GPU_TESTS=1` says that there is none on purpose.

use super::memory::{Buffer, Use};
use super::raw::{Dispatch, Gpu};
use super::*;
use crate::error::Error;
use hanzo_kernels::Key;
use hanzo_kernels::args::{Args, Fill};

/// Device 0 under validation, or nothing if the environment says that this machine has no driver.
pub(super) fn gpu(options: VulkanOptions) -> Option<Gpu> {
    if std::env::var("HANZO_NO_GPU_TESTS").is_ok_and(|v| v == "1") {
        return None;
    }
    let options = VulkanOptions { validate: true, ..options };
    Some(Gpu::open(0, &options).expect("a Vulkan driver and the validation layer (or HANZO_NO_GPU_TESTS=1)"))
}

/// Fails if the validation layer said anything.
pub(super) fn assert_clean(gpu: &Gpu) {
    assert_eq!(gpu.device().take_messages(), Vec::<String>::new());
}

fn fill(gpu: &Gpu) -> raw::Kernel {
    let code = hanzo_kernels::spirv(Key { op: "fill", format: None }).expect("the fill kernel");
    gpu.kernel("fill", code, &[256, gpu.wave(), 0]).expect("a pipeline")
}

fn args(y: u64, value: u32, count: u32) -> Vec<u8> {
    let fill = Fill { y, value, count };
    let mut places = Vec::new();
    let mut bytes = fill.encode(&mut |at, p: u64| places.push((at, p)));
    for (at, p) in places {
        bytes[at..at + 8].copy_from_slice(&p.to_le_bytes());
    }
    bytes
}

#[test]
fn devices_are_listed_with_their_numbers() {
    if gpu(VulkanOptions::default()).is_none() {
        return;
    }
    let all = devices(&Instance::new(false).expect("an instance")).expect("devices");
    assert!(!all.is_empty());
    for (i, d) in all.iter().enumerate() {
        assert_eq!(d.index, i);
        assert!(d.to_string().starts_with(&format!("vulkan:{i} {}", d.name)), "{d}");
    }
    let e = Device::open(99, &VulkanOptions::default()).expect_err("no such device").to_string();
    assert!(e.contains("vulkan:99") && e.contains(&all[0].name), "{e}");
}

#[test]
fn a_device_that_fails_to_open_takes_down_what_was_made_for_it() {
    if gpu(VulkanOptions::default()).is_none() {
        return;
    }
    for fail_at in 0.. {
        let instance = Instance::new(true).expect("an instance");
        let mut told = 0;
        let made = &mut |what: &'static str| {
            told += 1;
            if told > fail_at { Err(super::error::unsupported(format!("{what} was made"))) } else { Ok(()) }
        };
        let opened = Device::open_on(instance.clone(), 0, &VulkanOptions::default(), made);
        let done = opened.is_ok();
        drop(opened);
        assert_eq!(std::sync::Arc::strong_count(&instance), 1);
        // The layer objects to a device destroyed before what was made on it, and to an instance before its device.
        let messages = instance.messages();
        drop(instance);
        assert_eq!(messages(), Vec::<String>::new(), "failing behind step {fail_at}");
        if done {
            assert!(fail_at >= 6);
            break;
        }
    }
}

#[test]
fn a_kernel_writes_what_it_is_told_and_the_validation_layer_is_silent() {
    let Some(gpu) = gpu(VulkanOptions::default()) else { return };
    let y = gpu.filled(4 * 1000, 7).expect("memory");
    gpu.launch(fill(&gpu), &args(y.address(), 42, 999), [4, 1, 1]).expect("a launch");
    let words: Vec<u32> = gpu.read(&y).expect("read").as_chunks().0.iter().map(|w| u32::from_le_bytes(*w)).collect();
    assert!(words[..999].iter().all(|w| *w == 42));
    assert_eq!(words[999], 7);
    let bytes: Vec<u8> = (0..100_003u32).map(|i| (i * 7) as u8).collect();
    assert_eq!(gpu.read(&gpu.upload(&bytes).expect("upload")).expect("read"), bytes);
    assert_clean(&gpu);
}

#[test]
fn barriers_order_launches_that_write_the_same_words() {
    let Some(gpu) = gpu(VulkanOptions::default()) else { return };
    let (y, kernel) = (gpu.zeros(4 << 16).expect("memory"), fill(&gpu));
    let list: Vec<Vec<u8>> = (1..=50).map(|v| args(y.address(), v, 1 << 16)).collect();
    let list: Vec<_> = list.iter().map(|args| Dispatch { kernel, args, groups: [256, 1, 1] }).collect();
    gpu.launch_all(&list, true).expect("launches");
    assert!(gpu.read(&y).expect("read").as_chunks().0.iter().all(|w| *w == [50u8, 0, 0, 0]));
    assert_clean(&gpu);
}

#[test]
fn bad_launches_and_bad_kernels_are_errors() {
    let Some(gpu) = gpu(VulkanOptions::default()) else { return };
    let (y, kernel) = (gpu.zeros(64).expect("memory"), fill(&gpu));
    assert!(gpu.launch(kernel, &[0; 132], [1, 1, 1]).is_err());
    assert!(gpu.launch(kernel, &args(y.address(), 0, 0), [1, 0, 1]).is_err());
    let code = hanzo_kernels::spirv(Key { op: "fill", format: None }).expect("the fill kernel");
    for constants in [&[][..], &[256, 3, 0], &[256, 1 << 20, 0], &[gpu.wave() + 1, gpu.wave(), 0], &[0, gpu.wave(), 0]]
    {
        let e = gpu.kernel("fill", code, constants).expect_err("constants").to_string();
        assert!(e.contains("fill"), "{e}");
    }
    assert_clean(&gpu);
}

#[test]
fn memory_that_cannot_be_had_is_an_error_with_sizes_and_a_remedy() {
    let Some(gpu) = gpu(VulkanOptions::default()) else { return };
    let e = gpu.zeros(1 << 46).err().expect("64 TiB").to_string();
    assert!(e.contains("GiB") && (e.contains("-ngl") || e.contains("-ot")), "{e}");
    assert_clean(&gpu);
}

#[test]
fn buffers_do_not_overlap_and_come_back() {
    let Some(gpu) = gpu(VulkanOptions::default()) else { return };
    let mut random = 12345u64;
    let mut live: Vec<Buffer> = Vec::new();
    for i in 0..400 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let r = random >> 33;
        if i % 3 == 2 {
            let gone = live.remove(r as usize % live.len());
            assert_eq!(gone.address() % 256, 0);
        }
        live.push(Buffer::new(gpu.device(), Use::Device, r % 300_000, "a buffer").expect("memory"));
        let mut at: Vec<(u64, u64)> = live.iter().map(|b| (b.address(), b.address() + b.bytes().max(1))).collect();
        at.sort();
        assert!(at.windows(2).all(|w| w[0].1 <= w[1].0), "{at:x?}");
    }
    let first = live.iter().map(Buffer::address).min();
    live.clear();
    let again = Buffer::new(gpu.device(), Use::Device, 1000, "a buffer").expect("memory");
    assert!(Some(again.address()) <= first.map(|f| f.max(again.address())));
    let large = Buffer::new(gpu.device(), Use::Device, 300 << 20, "a large buffer").expect("memory");
    assert_eq!(large.offset(), 0);
    assert_clean(&gpu);
}

#[test]
fn the_pipeline_cache_is_written_and_read_and_a_damaged_one_is_ignored() {
    let folder = std::env::temp_dir().join(format!("hanzo-vk-cache-{}", std::process::id()));
    let options = VulkanOptions { pipeline_cache: Some(folder.clone()), ..Default::default() };
    let Some(first) = gpu(options.clone()) else { return };
    fill(&first);
    drop(first);
    let files: Vec<_> = std::fs::read_dir(&folder).expect("a folder").map(|f| f.expect("a file").path()).collect();
    let [file] = files.as_slice() else { panic!("{files:?}") };
    assert_eq!(file.extension().and_then(|e| e.to_str()), Some("bin"));
    let mut bytes = std::fs::read(file).expect("the cache");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(file, &bytes).expect("write");
    for _ in 0..2 {
        let again = gpu(options.clone()).expect("a device");
        fill(&again);
        assert_clean(&again);
    }
    std::fs::remove_dir_all(folder).expect("clean up");
}

#[test]
fn an_unknown_failure_of_the_driver_names_what_failed() {
    let e = super::error::failed("frob")(ash::vk::Result::ERROR_UNKNOWN);
    assert!(matches!(&e, Error::Device { backend: "vulkan", what } if what.contains("frob")), "{e}");
    let e = super::error::failed("frob")(ash::vk::Result::ERROR_OUT_OF_DEVICE_MEMORY);
    assert!(matches!(&e, Error::Memory(what) if what.contains("-ngl")), "{e}");
}

#[test]
fn a_lost_device_says_so_from_then_on_and_is_closed_cleanly() {
    let Some(gpu) = gpu(VulkanOptions::default()) else { return };
    let memory = gpu.zeros(64).expect("memory");
    let first = gpu.device().error(ash::vk::Result::ERROR_DEVICE_LOST, "add two numbers").to_string();
    assert!(first.contains("was lost while it had to add two numbers") && first.contains("vulkan:0"), "{first}");
    for later in [gpu.read(&memory).err(), gpu.zeros(64).err(), gpu.device().settle().err()] {
        assert_eq!(later.map(|e| e.to_string()), Some(first.clone()));
    }
    let messages = gpu.device().instance.clone();
    drop((memory, gpu));
    assert_eq!(messages.take_messages(), Vec::<String>::new());
}

#[test]
fn what_the_validation_layer_objects_to_is_an_error() {
    let Some(gpu) = gpu(VulkanOptions::default()) else { return };
    let memory = gpu.zeros(64).expect("memory");
    let pool = super::commands::Pool::new(gpu.device(), gpu.device().compute().family).expect("a pool");
    let r = pool.record().expect("recording");
    // SAFETY: not submitted; the layer refuses it while it is recorded.
    unsafe { gpu.device().raw.cmd_fill_buffer(r.cmd, memory.buffer.handle(), 2, 64, 0) };
    let e = gpu.device().validated().expect_err("an offset of 2").to_string();
    assert!(e.contains("validation layer") && e.contains("dstOffset"), "{e}");
    assert_eq!(gpu.device().validated(), Ok(()));
}
