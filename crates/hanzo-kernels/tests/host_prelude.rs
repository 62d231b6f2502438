//! The host prelude finds what a GPU would not define: one small kernel per kind of fault, and one that is right at every wave size.
//! The kernels are written with the entry that the assembler prints, so that nothing but the prelude is tested.
#![cfg(unix)]
use hanzo_kernels::host::{Error, HostKernel, Memory};

const PRELUDE: &str = include_str!("../prelude/host.h");

/// A kernel with read-only `x`, write-only `y` and readable `z`, an argument `n` and two shared arrays, around `body`.
fn text(body: &str) -> String {
    format!(
        "#define HZ_NAME \"test\"\n#ifndef THREADS\n#define THREADS 64u\n#endif\n#ifndef WAVE\n#define WAVE 32u\n#endif\n{PRELUDE}\nstatic void hz_kernel() {{\n\
         const RO x = hz::ro(\"x\", 0); const RW y = hz::wo(\"y\", 8); const RW z = hz::rw(\"z\", 16); const u32 n = hz::arg<u32>(24);\n\
         static hz::Shared<f32, (THREADS)> part(\"part\"); static hz::Shared<u32x4, (4u)> tile(\"tile\");\n// op test\n#line 1\n{body}\n}}\n"
    )
}

/// Runs it over two workgroups; gives `y` and `z`.
fn run(body: &str, wave: u32) -> Result<(Vec<f32>, Vec<u32>), Error> {
    let kernel = HostKernel::compile(&text(body), &[("WAVE", wave)])?;
    let mut memory = Memory::new();
    let x: Vec<u8> = (0..128u32).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let (x, y, z) = (memory.read(&x), memory.output(128 * 4), memory.write(&[0; 128 * 4]));
    let mut args = Vec::new();
    for address in [x, y, z] {
        args.extend_from_slice(&address.to_le_bytes());
    }
    args.extend_from_slice(&128u32.to_le_bytes());
    kernel.run(&mut memory, &args, [2, 1, 1])?;
    Ok((memory.f32s(y), memory.u32s(z)))
}

#[track_caller]
fn faults(body: &str, with: &str) {
    match run(body, 32) {
        Err(Error::Fault(message)) => assert!(message.contains(with), "{message}"),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("no fault"),
    }
}

#[test]
fn a_sum_over_the_workgroup_is_right_at_every_wave_size() {
    let body = "f32 v = LDF(x, GROUP_X * THREADS + THREAD);
        f32 s = wave_sum(v); f32 m = wave_max(v); i32 c = wave_sum_i(1);
        if (LANE == 0u) part[WAVE_ID] = s;
        BARRIER;
        f32 all = 0.0f;
        for (u32 i = 0u; i < THREADS / WAVE; i++) all += part[i];
        STF(y, GROUP_X * THREADS + THREAD, all);
        ST1(z, GROUP_X * THREADS + THREAD, u32(m) * 1000u + u32(c));";
    for wave in [1, 2, 8, 32, 64] {
        let (y, z) = run(body, wave).unwrap();
        for t in 0..128u32 {
            assert_eq!(y[t as usize], if t < 64 { 2016.0 } else { 6112.0 }, "wave {wave}");
            assert_eq!(z[t as usize], (t / wave * wave + wave - 1) * 1000 + wave, "wave {wave}");
        }
    }
}

#[test]
fn wave_xor_and_atomics_work() {
    let body = "f32 v = wave_xor(LDF(x, THREAD), 3u); ATOMIC_ADD(z, 5u, 2u);
        if (GROUP_X == 0u) { STF(y, THREAD, v); tile[0] = mk4(1u, 2u, 3u, 4u); }";
    let body = &body.replace("tile[0] =", "if (THREAD == 0u) tile[0] =");
    let (y, z) = run(body, 8).unwrap();
    assert_eq!(z[5], 256);
    for (t, v) in y.iter().take(64).enumerate() {
        assert_eq!(*v, (t ^ 3) as f32);
    }
}

#[test]
fn members_of_shared_vectors_are_values() {
    let body = "if (THREAD < 4u) { tile[THREAD] = mk4(THREAD, 1u, 2u, 3u); tile[THREAD].w = 9u; }
        BARRIER;
        u32x4 t = tile[THREAD & 3u];
        ST1(z, GROUP_X * THREADS + THREAD, t.x + tile[1].y + t.w);";
    let (_, z) = run(body, 32).unwrap();
    assert_eq!(z[7], 3 + 1 + 9);
}

#[test]
fn a_result_that_depends_on_the_order_of_workgroups_is_a_fault() {
    // Who comes last adds up what both left: the same in any order, unless it says who it was.
    let last = |own: &str| {
        format!(
            "if (THREAD == 0u) CSTF(z, 1u + GROUP_X, 1.0f + f32(GROUP_X)); FENCE; BARRIER;
            if (THREAD == 0u) part[0] = f32(ATOMIC_ADD(z, 0u, 1u)); BARRIER;
            if (part[0] == 1.0f) {{ FENCE; if (THREAD == 0u) {{ ST1(z, 0u, 0u); STF(y, 0u, CLDF(z, 1u) + CLDF(z, 2u) + {own}); }} }}"
        )
    };
    for wave in [1, 8, 32, 64] {
        let (y, z) = run(&last("0.0f"), wave).unwrap();
        assert_eq!((y[0], z[0]), (3.0, 0), "wave {wave}");
    }
    faults(&last("f32(GROUP_X)"), "depends on the order of workgroups");
}

#[test]
fn a_read_out_of_bounds_is_a_fault() {
    faults(
        "STF(y, GROUP_X * THREADS + THREAD, LDF(x, THREAD + 65u));",
        "thread 63 of workgroup (0, 0, 0): LDF of `x` at element 128 is out of bounds: 512 bytes",
    );
    faults("LD4(x, 32u);", "LD4 of `x` at element 32 is out of bounds");
}

#[test]
fn a_write_out_of_bounds_is_a_fault() {
    faults("STF(y, 128u + THREAD, 1.0f);", "STF of `y` at element 128 is out of bounds");
}

#[test]
fn moving_a_pointer_keeps_its_end() {
    faults("RO q = ADV(x, 31u); LD4(q, 0u); LD4(q, 1u);", "LD4 of `x` at element 1 is out of bounds: 16 bytes");
}

#[test]
fn a_shared_read_of_another_thread_needs_a_barrier() {
    faults(
        "part[THREAD] = 1.0f; STF(y, GROUP_X * THREADS + THREAD, part[THREAD ^ 1u]);",
        "a write of `part[1]` races: another thread read it",
    );
    faults(
        "part[THREAD] = 1.0f; wave_sum(1.0f); STF(y, GROUP_X * THREADS + THREAD, part[THREAD ^ 1u]);",
        "a read of `part[1]` races: thread 1 wrote it",
    );
}

#[test]
fn two_threads_may_not_write_one_shared_element() {
    faults("part[THREAD / 2u] = 1.0f;", "a write of `part[0]` races: thread 0 wrote it");
}

#[test]
fn a_shared_array_has_bounds() {
    faults("part[THREAD + 1u] = 1.0f;", "`part[64]` is out of bounds");
}

#[test]
fn shared_memory_starts_as_nan() {
    let (y, _) = run("STF(y, GROUP_X * THREADS + THREAD, part[THREAD]); part[THREAD] = 1.0f;", 32).unwrap();
    assert!(y.iter().all(|v| v.is_nan()));
}

#[test]
fn threads_that_miss_a_barrier_are_a_fault() {
    faults(
        "if (THREAD != 40u) BARRIER;",
        "a workgroup diverged: it waits at the BARRIER of line 1, thread 40 has returned",
    );
}

#[test]
fn lanes_that_miss_a_wave_word_are_a_fault() {
    faults(
        "if (LANE != 7u) wave_sum(1.0f);",
        "a wave diverged: it waits at the wave_sum of line 1, thread 7 has returned",
    );
    faults("if (LANE == 7u) { BARRIER; } else { wave_max(1.0f); }", "a wave diverged");
}

#[test]
fn threads_may_not_write_one_word_of_an_output() {
    faults("STF(y, THREAD, 1.0f);", "workgroup (1, 0, 0): STF of `y` at element 0 races: another thread wrote it");
}

#[test]
fn a_word_that_another_thread_wrote_may_not_be_read() {
    faults(
        "ST1(z, GROUP_X * THREADS + THREAD, 1u); BARRIER; RW1(z, (GROUP_X * THREADS + THREAD) ^ 1u);",
        "RW1 of `z` at element 1 races",
    );
}

#[test]
fn an_output_that_is_only_written_may_not_be_read() {
    faults("RWF(y, THREAD);", "RWF of `y`, which is declared `wo`");
}

#[test]
fn a_shift_by_32_and_a_local_index_out_of_bounds_are_faults() {
    faults(
        "ST1(z, GROUP_X * THREADS + THREAD, n << (THREAD + 1u));",
        "thread 31 of workgroup (0, 0, 0): line 1: a shift by 32 bits or more",
    );
    faults(
        "u32 a[4]; a[0] = 0u; a[1] = 1u; a[2] = 0u; a[3] = 0u; ST1(z, GROUP_X * THREADS + THREAD, a[THREAD]);",
        "line 1: an index outside of a local array",
    );
    faults(
        "ST1(z, GROUP_X * THREADS + THREAD, u32(LDF(x, THREAD) - 1.0f));",
        "line 1: a float outside of the integer type",
    );
}

#[test]
fn text_that_does_not_compile_is_an_error_with_the_compilers_words() {
    let Err(Error::Text(message)) = HostKernel::compile(&text("undeclared = 1;"), &[]) else { panic!("it compiled") };
    assert!(message.contains("undeclared"), "{message}");
}
