#!/bin/sh
# Make a base image in the layout of vllm/vllm-openai, with vLLM for a CPU in it, from Ubuntu's packages.
#
#   base.sh IMAGE PACKAGES    PACKAGES is the site-packages of an environment of Python 3.12
#
# As there: Python 3.12 of the distribution, packages in /usr/local/lib/python3.12/dist-packages, user root, entrypoint
# ["vllm", "serve"], and nothing that reads audio files. What a GPU needs is not in it.
set -eu

image=$1 packages=$2
dist=/usr/local/lib/python3.12/dist-packages

scratch=$(mktemp -d)
container=$(buildah from scratch)
trap 'buildah rm "$container" >/dev/null; rm -rf "$scratch"' EXIT
root=$(buildah mount "$container")

# Debian has no package of Ubuntu's keys. Its archive's key of 2018, by the fingerprint that Ubuntu publishes:
key=F6ECB3762474EDA9D21B7022871920D1991BC93C
mirror=http://archive.ubuntu.com/ubuntu
python3 - "$mirror/pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb" "$scratch/keys.deb" <<'END'
import sys, urllib.request
urllib.request.urlretrieve(*sys.argv[1:])
END
dpkg-deb -x "$scratch/keys.deb" "$scratch"
gpg --homedir "$scratch" --quiet --import "$scratch/usr/share/keyrings/ubuntu-archive-keyring.gpg"
gpg --homedir "$scratch" --quiet --export "$key" >"$scratch/key.gpg"

# The last argument: debootstrap may not know the name yet, and all of Ubuntu's are made by one script.
debootstrap --variant=minbase --components=main,universe --keyring="$scratch/key.gpg" \
  --include=python3,python3-dev,python3-pip,ca-certificates,g++,libgomp1,libnuma1 \
  noble "$root" "$mirror" /usr/share/debootstrap/scripts/gutsy
rm -rf "$root"/var/cache/apt/archives/*.deb

cp -a "$packages/." "$root$dist/"
for name in av librosa soundfile _soundfile soxr voxtral_serve _voxtral_serve pip; do
  rm -rf "${root:?}$dist/$name" "${root:?}$dist/$name"[.-]*
done
cat >"$root/usr/local/bin/vllm" <<'END'
#!/usr/bin/python3
import sys
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    sys.exit(main())
END
chmod 755 "$root/usr/local/bin/vllm"
# uv has written no bytecode into the official image: https://github.com/vllm-project/vllm/pull/55422
find "$root$dist" -name __pycache__ -prune -exec rm -rf {} +
if chroot "$root" python3 -Bc "import soundfile" 2>/dev/null; then
  echo "the base reads audio files by itself: nothing would be tested of what the image adds" >&2
  exit 1
fi

buildah config --entrypoint '["vllm", "serve"]' --cmd '' --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
buildah commit --quiet "$container" "$image"
