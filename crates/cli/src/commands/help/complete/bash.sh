# Completion of holdfast for bash. The program itself finds what can stand at the cursor.
_holdfast() {
    local line=${COMP_LINE:0:COMP_POINT} files value about
    local word=${line##*[[:space:]]}
    # Readline replaces only what stands behind the last of its word breaks.
    local skip=$word
    while [[ -n $skip && ! (${skip: -1} == [:=@] && $COMP_WORDBREAKS == *"${skip: -1}"*) ]]; do
        skip=${skip%?}
    done
    COMPREPLY=()
    {
        IFS= read -r files
        while IFS=$'\t' read -r value about; do
            COMPREPLY+=("${value#"$skip"}")
        done
    } < <("$1" complete --line "$line" 2>/dev/null)
    local IFS=$'\n'
    case $files in
        files) compopt -o filenames; COMPREPLY+=($(compgen -f -- "${word#"$skip"}")) ;;
        folders) compopt -o filenames; COMPREPLY+=($(compgen -d -- "${word#"$skip"}")) ;;
    esac
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[:=@] ]]; then
        compopt -o nospace
    fi
}
complete -F _holdfast holdfast
