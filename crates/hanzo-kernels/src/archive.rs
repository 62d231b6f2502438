//! The SPIR-V that the build script compiled, unpacked once.

use crate::Key;
use std::collections::HashMap;
use std::io::Read;
use std::sync::OnceLock;

static PACKED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/spirv.bin"));

fn unpacked() -> &'static HashMap<String, Vec<u32>> {
    static MODULES: OnceLock<HashMap<String, Vec<u32>>> = OnceLock::new();
    MODULES.get_or_init(|| {
        let mut raw = Vec::new();
        // Written by the build script; a short read would show as a missing kernel.
        let _ = flate2::read::DeflateDecoder::new(PACKED).read_to_end(&mut raw);
        let words =
            |b: &[u8]| b.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect::<Vec<_>>();
        let mut modules = HashMap::new();
        let mut rest = &raw[..];
        while let Some((head, tail)) = rest.split_at_checked(8) {
            let sizes = words(head);
            let (key, code) = (sizes[0] as usize, 4 * sizes[1] as usize);
            let Some((body, tail)) = tail.split_at_checked(key + code) else { break };
            modules.insert(String::from_utf8_lossy(&body[..key]).into_owned(), words(&body[key..]));
            rest = tail;
        }
        modules
    })
}

/// A kernel's SPIR-V words; none if there is no such Vulkan kernel.
pub fn spirv(key: Key) -> Option<&'static [u32]> {
    unpacked().get(&key.to_string()).map(Vec::as_slice)
}

/// Does the kernel's SPIR-V ask for matrix units (cooperative matrices), which not every device has?
pub fn needs_matrix_units(key: Key) -> bool {
    // SPIR-V: five words of header, then instructions: their words in the high half of the first, the opcode in the low half.
    const CAPABILITY: u32 = 17;
    // CooperativeMatrixKHR, and what NV_cooperative_matrix2 adds.
    const UNITS: [u32; 6] = [6022, 5430, 5431, 5432, 5433, 5434];
    let words = spirv(key).unwrap_or_default();
    let capabilities = words.get(5..).unwrap_or_default().as_chunks::<2>().0.iter();
    capabilities.take_while(|w| w[0] == 2 << 16 | CAPABILITY).any(|w| UNITS.contains(&w[1]))
}

/// Bytes of all modules: packed and unpacked.
pub fn spirv_bytes() -> (usize, usize) {
    (PACKED.len(), unpacked().values().map(|m| 4 * m.len()).sum())
}
